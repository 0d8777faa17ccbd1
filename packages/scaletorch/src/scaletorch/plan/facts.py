"""Facts derived from a description: the blocks, parameter groups and gradient buckets of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeVar, cast

from .description import Description, Layout
from .stages import Content, contents

BUCKET_SIZE = 2**24  # elements; the default of `parallelize`
SMALL = 2**18  # least elements of a bucket; below this, latency dominates
LEAST_BUCKETS = 8  # buckets of a model, unless `SMALL` allows fewer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The state of an optimizer, and the dtype in which gradients are accumulated."""

    moments: int = 2  # number of state tensors with the shape of each updated tensor
    item: int | None = None  # bytes of their elements; None for those of the updated tensor
    per_tensor: int = 4  # further bytes for each tensor, such as a step count
    # Bytes of the elements of accumulated gradients; None for those of the parameters. 4 is
    # `grad_type=torch.float32`.
    sum_item: int | None = None
    # Whether the backend reduce-scatters by itself, as NCCL does for all but 16-bit floats, which
    # this library sums; gloo receives the full data of the other ranks.
    native: bool = True


class Group(NamedTuple):
    """Parameters of a rank whose gradients are reduced over the same ranks."""

    axis: str  # "cp_dp", or "edp" for experts
    item: int  # bytes of an element
    elements: int = 0  # elements of all parameters
    tensors: int = 0  # number of parameters
    largest: int = 0  # elements of the largest parameter
    others: int = 0  # number of other pipeline ranks to which all of these are tied
    deferred: int = 0  # elements whose gradients the second half of a split backward makes
    most: int = 0  # elements of the largest of these parameters
    layer: int = 0  # elements in the largest layer
    rest: int = 0  # elements outside the layers

    @property
    def usual(self) -> int:
        """The largest number of elements in a bucket of several tensors."""
        return min(BUCKET_SIZE, max(self.elements // LEAST_BUCKETS, SMALL))

    @property
    def bucket(self) -> int:
        """Elements of the largest bucket; a large tensor has a bucket of its own."""
        return min(self.elements, max(self.usual, self.largest))

    def in_a_row(self, count: int) -> int:
        """Return the elements of `count` buckets that are filled one after another."""
        alone = self.largest > self.usual and self.layer > 0  # each tensor has its own bucket
        most = 2 if 2 * self.largest > self.usual else count  # buckets leave between layers
        return min(most * self.bucket, self.layer if alone else self.elements)


class Once:
    """A cache of results by key."""

    def __init__(self) -> None:
        self._found: dict[Any, Any] = {}

    def once(self, key: object, work_out: Callable[[], T]) -> T:
        """Return the result for a key; `work_out` runs at the first call only."""
        if key not in self._found:
            self._found[key] = work_out()
        return cast(T, self._found[key])


class Facts(Once):
    """A description, and cached results derived from it; the optimizer is AdamW by default."""

    def __init__(self, description: Description, optimizer: Optimizer | None = None) -> None:
        super().__init__()
        self.description, self.optimizer = description, optimizer or Optimizer()
        self.layers = {block.kind for block in description.blocks if block.place == "layer"}
        self.contents: list[Content] = []  # of pipeline ranks, by their numbers
        self._numbers: dict[Content, int] = {}

    def numbers(self, layout: Layout) -> tuple[int, ...]:
        """Return a number for each pipeline rank; ranks with the same content share it."""
        return self._pipeline(layout)[0]

    def ends(self, layout: Layout) -> list[tuple[int, int]]:
        """Return (number, rank) of the first and last rank with each number; one has the peak."""
        return self._pipeline(layout)[1]

    def _pipeline(self, layout: Layout) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        key = layout.schedule, layout.grid.pp, layout.chunks

        def work_out() -> tuple[tuple[int, ...], list[tuple[int, int]]]:
            numbers = tuple(map(self._number, contents(self.description, *key)))
            # Between the first and the last, live micro-batches only increase or decrease.
            ranks = [(number, rank) for rank, number in enumerate(numbers)]
            ends = *dict(reversed(ranks)).items(), *dict(ranks).items()
            return numbers, [*dict.fromkeys(ends)]

        return self.once(key, work_out)

    def _number(self, content: Content) -> int:
        number = self._numbers.setdefault(content, len(self.contents))
        if number == len(self.contents):
            self.contents.append(content)
        return number

    def handed(self, layout: Layout) -> int:
        """Return the bytes of a message between stages: the largest output of a block."""

        def work_out() -> int:
            kinds = {block.kind for block in self.description.blocks if block.place != "last"}
            behaviours = self.description.behaviours(layout.cut)
            return round(max(behaviours[kind].handed.at(layout.micro_rows) for kind in kinds))

        return self.once(("handed", layout.cut, layout.micro_rows), work_out)

    def groups(self, layout: Layout, number: int) -> tuple[Group, ...]:
        """Return the parameter groups of a rank with this number, on the fullest tp and ep rank."""
        grid = layout.grid
        key = "groups", grid.tp, grid.ep, grid.etp, number
        return self.once(key, lambda: tuple(self._groups(layout, number)))

    def _groups(self, layout: Layout, number: int) -> list[Group]:
        grid, behaviours = layout.grid, self.description.behaviours(layout.cut)
        apart = grid.ep * grid.etp != grid.tp  # if equal, edp is cp x dp
        content = self.contents[number]
        others, seen = dict(content.ties), set[str]()
        found: dict[tuple[str, int, int], Group] = {}
        kinds = Counter[int]()
        for kind, times in chain(*content.chunks):
            kinds[kind] += times
        for kind, times in kinds.items():
            sizes: dict[tuple[str, int, int], int] = {}
            for each in behaviours[kind].parameters:
                name = f"{kind}.{each.name}"
                if name in seen:  # tied to an earlier parameter of this rank
                    continue
                tied = next((names for names in self.description.tied if name in names), ())
                seen.update(tied)
                more, elements = 1 if tied else times, each.local
                axis = "edp" if each.expert and apart else "cp_dp"
                key = axis, each.item, others.get(name, 0)
                own = found.get(key) or Group(axis, each.item, others=key[2])
                sizes[key] = sizes.get(key, 0) + elements
                found[key] = own._replace(
                    elements=own.elements + elements * more, tensors=own.tensors + more,
                    largest=max(own.largest, elements),
                    deferred=own.deferred + elements * more * each.deferred,
                    most=max(own.most, elements * each.deferred),
                )  # fmt: skip
            for key, size in sizes.items():
                own = found[key]
                if kind in self.layers:
                    found[key] = own._replace(layer=max(own.layer, size))
                else:
                    found[key] = own._replace(rest=own.rest + size * times)
        return [*found.values()]

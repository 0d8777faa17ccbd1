"""What ranks hold of parameters: by the ranks that sum their gradients, and in which buckets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from .description import Description
from .layout import Layout
from .stages import Content, contents

BUCKET_SIZE = 2**24  # elements, the default of `parallelize`
SMALL = 2**18  # elements of a bucket that costs little more to start than to send
LEAST_BUCKETS = 8  # of a model


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an optimizer keeps, and in what gradients are summed.

    Attributes:
        moments: Tensors that it keeps of the form of each that it updates.
        item: Bytes of their elements; None is as those of what it updates.
        per_tensor: Bytes besides for each tensor, such as a step.
        sum_item: Bytes of the elements of summed gradients; None is as those of parameters. 4 is
            `grad_type=torch.float32`.
        bucket_size: As for `parallelize`.
        native: Whether the backend sums shards by itself, as NCCL does, but of 16-bit floats, which
            are summed here; gloo takes all that other ranks send.
    """

    moments: int = 2
    item: int | None = None
    per_tensor: int = 4
    sum_item: int | None = None
    bucket_size: int = BUCKET_SIZE
    native: bool = True


class Group(NamedTuple):
    """Parameters of a rank whose gradients are summed over the same ranks.

    Attributes:
        axis: "cp_dp", or "edp" for experts.
        item: Bytes of an element.
        elements: Of all of them.
        tensors: How many there are.
        largest: Elements of the largest.
        others: Of how many other ranks of the pipeline they are tied to, all of these.
        layer: Elements of a layer, at most.
        rest: Elements of those outside of layers.
    """

    axis: str
    item: int
    elements: int = 0
    tensors: int = 0
    largest: int = 0
    others: int = 0
    layer: int = 0
    rest: int = 0

    def usual(self, size: int = BUCKET_SIZE) -> int:
        """Return the elements of a bucket of several tensors, at most."""
        return min(size, max(self.elements // LEAST_BUCKETS, SMALL))

    def buckets(self, size: int = BUCKET_SIZE) -> int:
        """Return about how many buckets there are."""
        return math.ceil(self.elements / self.usual(size))

    def bucket(self, size: int = BUCKET_SIZE) -> int:
        """Return the elements of the largest bucket: a large tensor has one of its own."""
        return min(self.elements, max(self.usual(size), self.largest))

    def in_a_row(self, count: int, size: int = BUCKET_SIZE) -> int:
        """Return the elements of so many buckets that are filled one after another."""
        if self.largest > self.usual(size) and self.layer:  # each tensor alone
            return min(2 * self.largest, self.layer)
        return min(count * self.bucket(size), self.elements)


class Known:
    """A description, and what was worked out of it: nothing is worked out twice.

    Args:
        description: The model.
        optimizer: What it keeps; by default AdamW.
    """

    def __init__(self, description: Description, optimizer: Optimizer | None = None) -> None:
        self.description, self.optimizer = description, optimizer or Optimizer()
        self.layers = {block.kind for block in description.blocks if block.place == "layer"}
        self.cache: dict[Any, Any] = {}
        self._numbers: dict[Content, int] = {}
        self._contents: list[Content] = []
        self._pipelines: dict[tuple[str, int, int], tuple[int, ...]] = {}

    def numbers(self, layout: Layout) -> tuple[int, ...]:
        """Return for each rank of the pipeline a number, the same for ranks with the same content.

        Raises:
            InvalidArgumentError: Fewer layers than stages, or a schedule that is not to be had.
        """
        key = layout.schedule, layout.grid.pp, layout.chunks
        if key not in self._pipelines:
            found = []
            for each in contents(self.description, layout):
                if each not in self._numbers:
                    self._numbers[each] = len(self._contents)
                    self._contents.append(each)
                found.append(self._numbers[each])
            self._pipelines[key] = tuple(found)
        return self._pipelines[key]

    def content(self, number: int) -> Content:
        """Return what ranks of a number have."""
        return self._contents[number]

    def handed(self, layout: Layout) -> int:
        """Return the bytes of a message between stages: the most that a block hands on."""
        key = "handed", layout.cut, layout.micro_rows
        found: int | None = self.cache.get(key)
        if found is None:
            kinds = {block.kind for block in self.description.blocks if block.place != "last"}
            behaviours = self.description.behaviours(layout.cut)
            found = round(max(behaviours[kind].handed.at(layout.micro_rows) for kind in kinds))
            self.cache[key] = found
        return found

    def ends(self, layout: Layout) -> list[tuple[int, int]]:
        """Return number and rank of the first and the last rank of each number.

        One of these holds the most: along the pipeline ranks with equal blocks keep ever more
        micro-batches, or ever fewer.
        """
        key = "ends", layout.schedule, layout.grid.pp, layout.chunks
        found: list[tuple[int, int]] | None = self.cache.get(key)
        if found is None:
            numbers = self.numbers(layout)
            last = {number: rank for rank, number in enumerate(numbers)}
            first = {number: rank for rank, number in reversed([*enumerate(numbers)])}
            both = [*first.items(), *last.items()]
            found = self.cache[key] = [*dict.fromkeys(both)]
        return found

    def groups(self, layout: Layout, number: int) -> tuple[Group, ...]:
        """Return the parameters of a rank of this number, on the fullest of its tp and ep ranks."""
        grid = layout.grid
        key = "groups", grid.tp, grid.ep, grid.etp, number
        found: tuple[Group, ...] | None = self.cache.get(key)
        if found is None:
            found = self.cache[key] = tuple(self._groups(layout, number))
        return found

    def _groups(self, layout: Layout, number: int) -> list[Group]:
        grid, behaviours = layout.grid, self.description.behaviours(layout.cut)
        apart = grid.ep * grid.etp != grid.tp  # else edp is cp x dp
        others, seen = dict(self._contents[number].ties), set[str]()
        found: dict[tuple[str, int, int], Group] = {}
        for kind, times in self._contents[number].kinds.items():
            sizes: dict[tuple[str, int, int], int] = {}
            for each in behaviours[kind].parameters:
                name = f"{kind}.{each.name}"
                if name in seen:  # tied to one that is here
                    continue
                tied = next((names for names in self.description.tied if name in names), ())
                seen.update(tied)
                more, elements = 1 if tied else times, max(each.local)
                axis = "edp" if each.expert and apart else "cp_dp"
                key = axis, each.item, others.get(name, 0)
                own = found.get(key) or Group(axis, each.item, others=key[2])
                sizes[key] = sizes.get(key, 0) + elements
                found[key] = own._replace(
                    elements=own.elements + elements * more, tensors=own.tensors + more,
                    largest=max(own.largest, elements),
                )  # fmt: skip
            for key, size in sizes.items():
                own = found[key]
                if kind in self.layers:
                    found[key] = own._replace(layer=max(own.layer, size))
                else:
                    found[key] = own._replace(rest=own.rest + size * times)
        return [*found.values()]

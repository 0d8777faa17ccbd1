"""Facts derived from a description: the blocks, micro-batches and parameter groups of ranks.

Blocks are distributed as the pipeline runtime does it: layers by count, the modules before them on
the first stage and those after them on the last. The schedule gives each rank its stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from itertools import chain, groupby
from typing import Any, NamedTuple, TypeVar, cast

from ..dist.errors import InvalidArgumentError
from ..parallel.pipeline_parallel import SCHEDULES, Schedule, distribute_layers
from .description import LOOPED, V_SHAPED, Description, Layout

SPLIT = ("zb_h1", "zb_v", "dualpipe_v")  # schedules that may split a backward in two halves
# Change of each action in live micro-batches, and in halves that wait for weight gradients.
CHANGES = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1)}
ROUNDS = 2  # rounds of interleaving until the number of live micro-batches stops growing
BUCKET_SIZE = 2**24  # elements; the default of `parallelize`
SMALL = 2**18  # least elements of a bucket; below this, latency dominates
LEAST_BUCKETS = 8  # buckets of a model, unless `SMALL` allows fewer

Runs = tuple[tuple[int, int], ...]  # (kind of block, number in a row)
F = TypeVar("F", bound=Callable[..., Any])


class Moment(NamedTuple):
    """The moment of an action at which a rank holds the most."""

    kind: str  # "F" (counts itself), "B", its halves "I" and "W", or "FB" (either of the two)
    chunk: int  # of the action
    whole: tuple[int, ...]  # live micro-batches by chunk, without halves
    halves: tuple[int, ...]  # first halves of backwards that wait for their second, by chunk
    # Numbers of chunks: whose earlier backwards began with a whole one; with a first half; and,
    # among the latter, that have also ended a second half or a whole one.
    begun: tuple[int, int, int]


class Content(NamedTuple):
    """The blocks of one pipeline rank."""

    chunks: tuple[Runs, ...]  # runs of equal blocks, by chunk
    sent: int  # number of chunks that send their output to another rank
    received: int  # number of chunks that receive their input from another rank
    ties: tuple[tuple[str, int], ...]  # tied parameters, and how many other ranks have each


def schedule_of(layout: Layout) -> Schedule:
    """Return the schedule of a layout with all its actions; refuse an unknown one."""
    return _built(layout.schedule, layout.grid.pp, layout.micro_batches, layout.chunks)


@lru_cache(maxsize=256)
def _built(schedule: str, pp: int, micro_batches: int, chunks: int) -> Schedule:
    if schedule not in SCHEDULES or schedule == "forward_only":
        known = ", ".join(name for name in SCHEDULES if name != "forward_only")
        raise InvalidArgumentError(f"schedule {schedule!r} is not one of {known}")
    if schedule in LOOPED and chunks > 0:
        return LOOPED[schedule](pp, micro_batches, num_chunks=chunks)
    wanted = 2 if schedule in V_SHAPED else 1
    if chunks != wanted:
        some = "1 or more" if schedule in LOOPED else str(wanted)
        raise InvalidArgumentError(
            f"{schedule} has {some} chunks on each rank of the pipeline, not {chunks}"
        )
    return SCHEDULES[schedule](pp, micro_batches)


def stages_of(schedule: str, pp: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each pipeline rank, in the order of its chunks."""
    return _built(schedule, pp, 1, chunks).stages


def contents(description: Description, schedule: str, pp: int, chunks: int) -> list[Content]:
    """Return the content of each pipeline rank; refuse stages without layers."""
    stages = stages_of(schedule, pp, chunks)
    owner = {stage: rank for rank, own in enumerate(stages) for stage in own}
    kinds = _kinds_of_stages(
        description, len(owner), f"pp {pp}" + f" x {chunks} chunks" * (chunks > 1)
    )
    on: dict[str, set[int]] = {}  # kind -> ranks that have it
    for stage, row in enumerate(kinds):
        for kind in row:
            on.setdefault(str(kind), set()).add(owner[stage])
    found = []
    for rank, numbers in enumerate(stages):
        runs = (tuple((k, len([*run])) for k, run in groupby(kinds[stage])) for stage in numbers)
        sent = sum(owner.get(stage + 1, rank) != rank for stage in numbers)
        received = sum(owner.get(stage - 1, rank) != rank for stage in numbers)
        ties = []
        for names in description.tied:
            holders = set[int]().union(*(on.get(name.partition(".")[0], ()) for name in names))
            ties += [(name, len(holders - {rank})) for name in names if rank in holders]
        found.append(Content(tuple(runs), sent, received, tuple(ties)))
    return found


def _kinds_of_stages(description: Description, count: int, pipeline: str) -> list[list[int]]:
    """Return the kinds of the blocks on each of `count` stages, in their order."""
    first, layers, last = (
        [block.kind for block in description.blocks if block.place == place]
        for place in ("first", "layer", "last")
    )
    if count == 1:
        return [[*first, *layers, *last]]
    if len(layers) < count:
        raise InvalidArgumentError(
            f"{len(layers)} layers are fewer than {count} stages: {pipeline}"
        )
    found = [[layers[at] for at in own] for own in distribute_layers(len(layers), count)]
    found[0] = [*first, *found[0]]
    found[-1] += last
    return found


def alive(layout: Layout, rank: int) -> tuple[Moment, ...]:
    """Return the moments of each kind of action at which a rank holds the most micro-batches."""
    schedule, pp, chunks = layout.schedule, layout.grid.pp, layout.chunks
    m = layout.micro_batches
    if schedule in ("afab", "looped_bfs"):
        none = (0,) * chunks
        first = Moment("FB", chunks - 1, (m,) * chunks, none, (0, 0, 0))
        # With gradients, once the first micro-batch is freed.
        begun = chunks, 0, 0
        return (first, Moment("B", chunks - 1, (m - 1,) * chunks, none, begun))[: min(m, 2)]
    few = enough(schedule, pp, m)
    return _alive(schedule, pp, few, chunks, few < m, rank)


def enough(schedule: str, pp: int, micro_batches: int) -> int:
    """Return a number of micro-batches, at most `micro_batches`, that keeps as many alive."""
    if schedule in V_SHAPED:
        return min(micro_batches, 2 * pp)
    if schedule != "interleaved_1f1b":
        return min(micro_batches, pp)
    number = max(1, micro_batches // pp)
    size, longer = divmod(micro_batches, number)  # `longer` rounds have size + 1
    return (size + 1) * min(longer, ROUNDS) + size * min(number - longer, ROUNDS)


@lru_cache(maxsize=4096)
def _alive(
    schedule: str, pp: int, m: int, chunks: int, more: bool, rank: int
) -> tuple[Moment, ...]:
    """Return the moments of `m` micro-batches; `more` is True if others follow."""
    if schedule == "1f1b":
        begun = int(more or pp - rank < m), 0, 0
        return (Moment("FB", 0, (min(pp - rank, m),), (0,), begun),)
    whole, halves, kinds = [0] * chunks, [0] * chunks, [""] * chunks  # kinds of backwards so far
    most: dict[tuple[str, int, int], tuple[tuple[int, ...], Moment]] = {}
    for action in _built(schedule, pp, m, chunks).ranks[rank]:
        kind, chunk = action.kind, action.chunk
        before = tuple(whole), tuple(halves)
        added, left = CHANGES[kind]
        whole[chunk] += added
        halves[chunk] += left
        counts = (tuple(whole), tuple(halves)) if kind == "F" else before
        both = sum(counts[0]), sum(counts[1])
        begun = _ends(schedule, pp, m, chunks, rank) if more else _begun(kinds)
        moment = Moment(kind, chunk, *counts, begun)
        for at, weighed in enumerate((both, (sum(both), both[0]), both[::-1], (*begun, *both))):
            if weighed >= most.get((kind, chunk, at), ((-1, -1), moment))[0]:
                most[kind, chunk, at] = weighed, moment
        if kind != "F":
            kinds[chunk] += kind
    found = dict.fromkeys(moment for _, moment in most.values())
    # The fullest first, so that a layout that does not fit is rejected soonest.
    return tuple(sorted(found, key=lambda moment: -sum(moment.whole)))


def _begun(kinds: list[str]) -> tuple[int, int, int]:
    """Return `Moment.begun` of chunks with these kinds of backwards."""
    halved = [own for own in kinds if own[:1] == "I"]
    return sum(own[:1] == "B" for own in kinds), len(halved), sum({*own} != {"I"} for own in halved)


def begun(layout: Layout, rank: int) -> tuple[int, int, int]:
    """Return `Moment.begun` at the end of a step on a pipeline rank."""
    few = enough(layout.schedule, layout.grid.pp, layout.micro_batches)
    return _ends(layout.schedule, layout.grid.pp, few, layout.chunks, rank)


@lru_cache(maxsize=4096)
def _ends(schedule: str, pp: int, m: int, chunks: int, rank: int) -> tuple[int, int, int]:
    if schedule not in SPLIT:
        return chunks, 0, 0
    kinds = [""] * chunks
    for action in _built(schedule, pp, m, chunks).ranks[rank]:
        kinds[action.chunk] += action.kind.replace("F", "")
    return _begun(kinds)


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


def once_for(key: Callable[..., object]) -> Callable[[F], F]:
    """Cache a function's results in `found` of its first argument, by a key of all arguments."""

    def decorate(work_out: F) -> F:
        @wraps(work_out)
        def find(*given: Any) -> Any:
            found, own = given[0].found, (work_out, key(*given))
            if (result := found.get(own)) is None:
                result = found[own] = work_out(*given)
            return result

        return cast(F, find)

    return decorate


class Facts:
    """A description, and cached results derived from it; the optimizer is AdamW by default."""

    def __init__(self, description: Description, optimizer: Optimizer | None = None) -> None:
        self.found: dict[Any, Any] = {}
        self.description, self.optimizer = description, optimizer or Optimizer()
        self.layers = {block.kind for block in description.blocks if block.place == "layer"}
        self.contents: list[Content] = []  # of pipeline ranks, by their numbers
        self._numbers: dict[Content, int] = {}

    @once_for(lambda _, layout: (layout.schedule, layout.grid.pp, layout.chunks))
    def pipeline(self, layout: Layout) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Return a number for each pipeline rank, which those with the same content share.

        Also (number, rank) of the first and last rank with each number: one of the two has the
        peak, since live micro-batches only increase or decrease between them.
        """
        found = contents(self.description, layout.schedule, layout.grid.pp, layout.chunks)
        for content in found:
            if content not in self._numbers:
                self._numbers[content] = len(self.contents)
                self.contents.append(content)
        numbers = tuple(self._numbers[content] for content in found)
        ranks = [(number, rank) for rank, number in enumerate(numbers)]
        ends = *dict(reversed(ranks)).items(), *dict(ranks).items()
        return numbers, [*dict.fromkeys(ends)]

    @once_for(lambda _, layout: (layout.cut, layout.micro_rows))
    def handed(self, layout: Layout) -> int:
        """Return the bytes of a message between stages: the largest output of a block."""
        kinds = {block.kind for block in self.description.blocks if block.place != "last"}
        behaviours = self.description.behaviours(layout.cut)
        return round(max(behaviours[kind].handed.at(layout.micro_rows) for kind in kinds))

    @once_for(lambda _, layout, number: (layout.grid.tp, layout.grid.ep, layout.grid.etp, number))
    def groups(self, layout: Layout, number: int) -> tuple[Group, ...]:
        """Return the parameter groups of a rank with this number, on the fullest tp and ep rank."""
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
        return tuple(found.values())

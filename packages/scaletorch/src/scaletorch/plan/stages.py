"""The blocks on each pipeline rank, and its live micro-batches.

Blocks are distributed as the pipeline runtime does it: layers by count, the modules before them on
the first stage and those after them on the last. The schedule gives each rank its stages.
"""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import chain, groupby
from typing import NamedTuple

from ..dist.errors import InvalidArgumentError
from ..parallel.pipeline_parallel import SCHEDULES, Schedule, distribute_layers
from .description import LOOPED, V_SHAPED, Description, Layout

SPLIT = ("zb_h1", "zb_v", "dualpipe_v")  # schedules that may split a backward in two halves
# Change of each action in live micro-batches, and in halves that wait for weight gradients.
CHANGES = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1)}
ROUNDS = 2  # rounds of interleaving until the number of live micro-batches stops growing

Runs = tuple[tuple[int, int], ...]  # (kind of block, number in a row)
Places = tuple[tuple[tuple[int, ...], ...], ...]
"""For each rank of the pipeline, for each of its chunks: indices of blocks."""


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
    _check(schedule, pp, chunks)
    build = SCHEDULES[schedule]
    if schedule in LOOPED:
        build = partial(LOOPED[schedule], num_chunks=chunks)
    return build(pp, micro_batches)


def stages_of(schedule: str, pp: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each pipeline rank, in the order of its chunks."""
    return _built(schedule, pp, 1, chunks).stages


def places(description: Description, schedule: str, pp: int, chunks: int) -> Places:
    """Return the block indices of each pipeline rank, by chunk; refuse stages without layers."""
    where = [block.place for block in description.blocks]
    first, layers, last = where.count("first"), where.count("layer"), where.count("last")
    stages = stages_of(schedule, pp, chunks)
    count = sum(map(len, stages))
    if count == 1:
        return ((tuple(range(first + layers + last)),),)
    if layers < count:
        times = f" x {chunks} chunks" if chunks > 1 else ""
        raise InvalidArgumentError(f"{layers} layers are fewer than {count} stages: pp {pp}{times}")
    cut = [[first + layer for layer in each] for each in distribute_layers(layers, count)]
    cut[0] = [*range(first), *cut[0]]
    cut[-1] += range(first + layers, first + layers + last)
    return tuple(tuple(tuple(cut[stage]) for stage in own) for own in stages)


def contents(description: Description, schedule: str, pp: int, chunks: int) -> list[Content]:
    """Return the content of each pipeline rank."""
    where = places(description, schedule, pp, chunks)
    stages = stages_of(schedule, pp, chunks)
    owner = {stage: rank for rank, own in enumerate(stages) for stage in own}
    kinds = [[[description.blocks[at].kind for at in chunk] for chunk in own] for own in where]
    on: dict[str, set[int]] = {}  # kind -> ranks that have it
    for rank, own in enumerate(kinds):
        for kind in chain(*own):
            on.setdefault(str(kind), set()).add(rank)
    found = []
    for rank, (numbers, rows) in enumerate(zip(stages, kinds, strict=True)):
        runs = (tuple((kind, len([*run])) for kind, run in groupby(row)) for row in rows)
        sent = sum(owner.get(stage + 1, rank) != rank for stage in numbers)
        received = sum(owner.get(stage - 1, rank) != rank for stage in numbers)
        ties = []
        for names in description.tied:
            holders = set[int]().union(*(on.get(name.partition(".")[0], ()) for name in names))
            ties += [(name, len(holders - {rank})) for name in names if rank in holders]
        found.append(Content(tuple(runs), sent, received, tuple(ties)))
    return found


def alive(layout: Layout, rank: int) -> tuple[Moment, ...]:
    """Return the moments of each kind of action at which a rank holds the most micro-batches."""
    schedule, pp, chunks = layout.schedule, layout.grid.pp, layout.chunks
    m = layout.micro_batches
    _check(schedule, pp, chunks)
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


def _check(schedule: str, pp: int, chunks: int) -> None:
    if schedule not in SCHEDULES or schedule == "forward_only":
        known = ", ".join(name for name in SCHEDULES if name != "forward_only")
        raise InvalidArgumentError(f"schedule {schedule!r} is not one of {known}")
    wanted = 2 if schedule in V_SHAPED else 1
    if chunks < 1 or (schedule not in LOOPED and chunks != wanted):
        some = "1 or more" if schedule in LOOPED else str(wanted)
        raise InvalidArgumentError(
            f"{schedule} has {some} chunks on each rank of the pipeline, not {chunks}"
        )

"""The library's schedules by name, and functions that build the schedule of a pipeline.

Each function takes the number N of ranks and the number m of micro-batches of one step (m may be
less than N), and raises `InvalidArgumentError` if a number is less than one. Ranks have one stage
each, or v stages (chunks) each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, pairwise

from ....dist.errors import InvalidArgumentError
from .schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Schedule

Builder = Callable[[int, int], Schedule]  # (ranks, micro-batches)
AnySchedule = str | Builder | Schedule


def forward_only(
    num_ranks: int, num_micro_batches: int, stages: Sequence[Sequence[int]] | None = None
) -> Schedule:
    """Forwards alone, for inference.

    No activations are kept. With one stage on each of N ranks, m micro-batches and a forward time
    of F, it takes (m + N - 1) F.

    Args:
        num_ranks: Number of ranks of the pipeline.
        num_micro_batches: Number of micro-batches of one step.
        stages: Each rank's stages, chunk by chunk; None is one stage on each rank.
    """
    _require_sizes(num_ranks, num_micro_batches)
    places = _looped_stages(num_ranks, 1) if stages is None else tuple(map(tuple, stages))
    ranks = tuple(_by_wave(own, num_micro_batches) for own in places)
    return Schedule("forward_only", num_micro_batches, places, ranks)


def _by_wave(stages: Sequence[int], num_micro_batches: int) -> tuple[Action, ...]:
    """Order a rank's forwards by when they could run if each stage had its own rank."""
    forwards = [
        (micro_batch + stage, stage, Action(FORWARD, micro_batch, chunk))
        for chunk, stage in enumerate(stages)
        for micro_batch in range(num_micro_batches)
    ]
    return tuple(action for _, _, action in sorted(forwards))


def afab(num_ranks: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards, both in micro-batch order; one stage on each rank.

    Source: GPipe, https://arxiv.org/abs/1811.06965. Every rank keeps the activations of all
    micro-batches.
    """
    return replace(looped_breadth_first(num_ranks, num_micro_batches, 1), name="afab")


def looped_breadth_first(num_ranks: int, num_micro_batches: int, num_chunks: int = 2) -> Schedule:
    """All forwards chunk by chunk, then all backwards from the last chunk to the first.

    Source: breadth-first pipeline parallelism, https://arxiv.org/abs/2211.05953. Every rank keeps
    the activations of all micro-batches of all its chunks. It uses each chunk's weights for all
    forwards in a row, and again for all backwards.

    Args:
        num_ranks: Number N of ranks; rank r has stages r, r + N, r + 2N and so on.
        num_micro_batches: Number of micro-batches of one step.
        num_chunks: Number of stages of each rank.
    """
    _require_sizes(num_ranks, num_micro_batches, num_chunks)
    stages = _looped_stages(num_ranks, num_chunks)
    forwards, backwards = _in_rounds([range(num_micro_batches)], num_chunks)
    actions = (*forwards, *backwards)
    return Schedule("looped_bfs", num_micro_batches, stages, (actions,) * num_ranks)


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Fill the pipeline, then alternate one forward with one backward, then drain it.

    Source: PipeDream-Flush, https://arxiv.org/abs/2006.09503. Rank r of N keeps the activations of
    at most N - r micro-batches.
    """
    _require_sizes(num_ranks, num_micro_batches)
    forwards, backwards = _in_rounds([range(num_micro_batches)], num_chunks=1)
    ranks = tuple(_one_by_one(forwards, backwards, after) for after in reversed(range(num_ranks)))
    return Schedule("1f1b", num_micro_batches, _looped_stages(num_ranks, 1), ranks)


def zb_h1(num_ranks: int, num_micro_batches: int) -> Schedule:
    """1F1B with postponed weight gradients: rank r postpones them by r micro-batches.

    Source: ZB-H1 of zero bubble pipeline parallelism, https://arxiv.org/abs/2401.10241. Every rank
    keeps the activations of at most N micro-batches until their "W", as many as the first rank of
    1F1B. With costs F = I = W = 1 and m >= N it takes 3 m + N - 1, against 1F1B's 3 (m + N - 1).
    """
    _require_sizes(num_ranks, num_micro_batches)
    return _written("zb_h1", _looped_stages(num_ranks, 1), num_micro_batches, num_ranks, _zb_h1)


def _zb_h1(rank: int, num_ranks: int, num_micro_batches: int) -> list[str]:
    after = num_ranks - rank - 1
    return [
        *after * ["F0"],
        *rank * ["F0", "I0"],
        *(num_micro_batches - num_ranks + 1) * ["F0", "I0", "W"],
        *after * ["I0", "W"],
        *rank * ["W"],
    ]


def interleaved_1f1b(num_ranks: int, num_micro_batches: int, num_chunks: int = 2) -> Schedule:
    """1F1B over several stages (chunks) per rank: rounds of N micro-batches run each chunk in turn.

    Source: Megatron-LM, https://arxiv.org/abs/2104.04473. If N does not divide the number of
    micro-batches, the rounds are as little larger than N as possible, the largest first. Fewer than
    N micro-batches form one round. With costs f and b of a chunk and m >= N it takes
    (m v + N - 1) (f + b). Rank r keeps the activations of at most (v - 1) s + 2 (N - 1 - r) + 1
    chunks, for a first round of s micro-batches; a chunk is 1/v of a stage of 1F1B.

    Args:
        num_ranks: Number N of ranks; rank r has stages r, r + N, r + 2N and so on.
        num_micro_batches: Number m of micro-batches of one step.
        num_chunks: Number v of stages of each rank.
    """
    _require_sizes(num_ranks, num_micro_batches, num_chunks)
    stages = _looped_stages(num_ranks, num_chunks)
    rounds = _rounds(num_ranks, num_micro_batches)
    forwards, backwards = _in_rounds(rounds, num_chunks)
    ahead = (num_chunks - 1) * len(rounds[0])
    ranks = tuple(
        _one_by_one(forwards, backwards, ahead + 2 * (num_ranks - rank - 1))
        for rank in range(num_ranks)
    )
    return Schedule("interleaved_1f1b", num_micro_batches, stages, ranks)


def _rounds(num_ranks: int, num_micro_batches: int) -> list[range]:
    """Divide the micro-batches into as many rounds of at least N as possible, or one round."""
    num_rounds = max(1, num_micro_batches // num_ranks)
    size, larger = divmod(num_micro_batches, num_rounds)
    ends = [index * size + min(index, larger) for index in range(num_rounds + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def _in_rounds(rounds: list[range], num_chunks: int) -> tuple[list[Action], list[Action]]:
    """Return the forwards and the backwards of rounds that run each chunk in turn."""
    chunks = range(num_chunks)
    forwards = [Action(FORWARD, m, chunk) for round_ in rounds for chunk in chunks for m in round_]
    backwards = [
        Action(BACKWARD, m, chunk) for round_ in rounds for chunk in chunks[::-1] for m in round_
    ]
    return forwards, backwards


def _one_by_one(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    """Run `ahead` forwards, alternate forwards and backwards, then run the remaining backwards."""
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = (action for pair in pairs for action in pair)
    return (*forwards[:ahead], *steady, *backwards[len(backwards) - ahead :])


def zb_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Zero bubble in a V: with m >= 2N - 1 no rank waits between its first and its last action.

    Source: ZB-V of zero bubble pipeline parallelism, https://arxiv.org/abs/2401.10241. Rank r has
    stages r and 2N - 1 - r. Every rank keeps at most 2N chunks' activations until their "W", as
    much as the first rank of 1F1B. With costs F = I = W = 1 of a chunk and m >= 2N - 1 it takes
    6 m + N - 1, the minimum. Fewer micro-batches run in the order for 2N - 1, without the missing
    ones.
    """
    stages = _v_shape(num_ranks, num_micro_batches)
    return _written("zb_v", stages, num_micro_batches, 2 * num_ranks - 1, _zb_v)


def dualpipe_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Pairs of a forward and a backward of different micro-batches, one after the other, in a V.

    Source: DualPipe "cut in half", https://github.com/deepseek-ai/DualPipe. Rank r has stages r and
    2N - 1 - r. Every rank keeps at most 2N + 1 chunks' activations until their "B" or "W". With
    costs F = I = W = 1 of a chunk and m >= 2N it takes 6 m + N - 1. Fewer micro-batches run in the
    order for 2N, without the missing ones.
    """
    stages = _v_shape(num_ranks, num_micro_batches)
    return _written("dualpipe_v", stages, num_micro_batches, 2 * num_ranks, _dualpipe_v)


# (rank, ranks, micro-batches) -> kinds and chunks: warm-up, steady state and drain, top to bottom
_Order = Callable[[int, int, int], list[str]]


def _v_shape(num_ranks: int, num_micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """Return each rank's stages in a V (down and up again): rank r of N has r and 2N - 1 - r."""
    _require_sizes(num_ranks, num_micro_batches, num_chunks=2)
    return tuple((rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks))


def _written(
    name: str,
    stages: tuple[tuple[int, ...], ...],
    num_micro_batches: int,
    least: int,
    order: _Order,
) -> Schedule:
    """Build the order for at least `least` micro-batches, and leave out those beyond the step's."""
    # Micro-batches are independent, so the remaining actions of an order that finishes also
    # finish, no later and with no more activations kept.
    num_ranks, enough = len(stages), max(num_micro_batches, least)
    ranks = (_numbered(order(rank, num_ranks, enough)) for rank in range(num_ranks))
    left = tuple(tuple(a for a in rank if a.micro_batch < num_micro_batches) for rank in ranks)
    return Schedule(name, num_micro_batches, stages, left)


def _zb_v(rank: int, num_ranks: int, num_micro_batches: int) -> list[str]:
    after = num_ranks - rank - 1  # ranks further down the V
    full = num_micro_batches - 2 * num_ranks + rank + 1
    return [
        *(2 * after + 1) * ["F0"],
        *rank * ["F1", "F0"],
        *(after + 1) * ["F1", "I1", "W"],
        *full * ["F0", "I0", "W", "F1", "I1", "W"],
        *after * ["I0", "W", "F1", "I1", "W"],
        *rank * ["I0", "I1"],
        *(after + 1) * ["I0", "W"],
        *2 * rank * ["W"],
    ]


def _dualpipe_v(rank: int, num_ranks: int, num_micro_batches: int) -> list[str]:
    after = num_ranks - rank - 1
    full = num_micro_batches - 2 * num_ranks + rank + 1
    drain = (rank + 1) * ["1", "0"]
    return [
        *2 * after * ["F0"],
        *(rank + 1) * ["F0", "F1"],
        *after * ["I1", "W", "F1"],
        *full * ["F0", "B1", "F1", "B0"],
        *after * ["B1", "F1", "B0"],
        *("B" + chunk for chunk in drain[: rank + 1]),
        *("I" + chunk for chunk in drain[rank + 1 :]),
        *after * ["W", "I0"],
        *(rank + 1) * ["W"],
    ]


def _numbered(order: list[str]) -> Iterator[Action]:
    """Number the micro-batches of each kind and chunk; a "W" belongs to the oldest open "I"."""
    waiting: deque[Action] = deque()
    forwards, backwards = (count(), count()), (count(), count())
    for entry in order:
        if entry == BACKWARD_WEIGHT:
            yield waiting.popleft()
            continue
        kind, chunk = entry[0], int(entry[1])
        action = Action(kind, next((forwards if kind == FORWARD else backwards)[chunk]), chunk)
        yield action
        if kind == BACKWARD_INPUT:
            waiting.append(Action(BACKWARD_WEIGHT, action.micro_batch, action.chunk))


def _looped_stages(num_ranks: int, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return each rank's stages in a loop: rank r of N has r, r + N, r + 2N and so on."""
    num_stages = num_ranks * num_chunks
    return tuple(tuple(range(rank, num_stages, num_ranks)) for rank in range(num_ranks))


def _require_sizes(num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> None:
    sizes = {"ranks": num_ranks, "micro-batches": num_micro_batches, "stages per rank": num_chunks}
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            message = f"the number of {name} of a schedule must be an int from 1, got {size!r}"
            raise InvalidArgumentError(message)


SCHEDULES: Mapping[str, Builder] = {
    "afab": afab,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_breadth_first,
    "zb_h1": zb_h1,
    "zb_v": zb_v,
    "dualpipe_v": dualpipe_v,
    "forward_only": forward_only,
}


def build_schedule(schedule: AnySchedule, num_ranks: int, num_micro_batches: int) -> Schedule:
    """Return the schedule of a step."""
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            message = f"schedule {schedule!r} is not one of {', '.join(SCHEDULES)}"
            raise InvalidArgumentError(message)
        schedule = SCHEDULES[schedule]
    if callable(schedule):
        schedule = schedule(num_ranks, num_micro_batches)
    if not isinstance(schedule, Schedule):
        raise InvalidArgumentError(
            "schedule must be a name, a Schedule, or a function of ranks and micro-batches that "
            f"returns one, got {type(schedule).__name__}"
        )
    sizes = schedule.num_ranks, schedule.num_micro_batches
    if sizes != (num_ranks, num_micro_batches):
        raise InvalidArgumentError(
            f"schedule {schedule.name!r} is for {sizes[0]} ranks and {sizes[1]} micro-batches, and "
            f"there are {num_ranks} ranks and {num_micro_batches} micro-batches"
        )
    return schedule


def stages_of(schedule: AnySchedule, num_ranks: int) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """Return each rank's stages, chunk by chunk, and whether the schedule splits backwards."""
    # A function builds an example with enough micro-batches to show each kind of action.
    count = schedule.num_micro_batches if isinstance(schedule, Schedule) else 4 * num_ranks
    example = build_schedule(schedule, num_ranks, count)
    splits = any(action.kind == BACKWARD_WEIGHT for rank in example.ranks for action in rank)
    return example.stages, splits

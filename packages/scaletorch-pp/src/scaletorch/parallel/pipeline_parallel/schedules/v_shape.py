"""Two stages on each rank, down the ranks and up again, so that the first rank has the loss too."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import count

from .making import require_sizes, v_stages
from .schedule import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Schedule


def zb_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Zero bubble in a V: with m >= 2N - 1 no rank waits between its first and its last action.

    Source: ZB-V of zero bubble pipeline parallelism, https://arxiv.org/abs/2401.10241. Every rank
    keeps at most 2N chunks' activations until their "W", as much as the first rank of 1F1B. With
    costs F = I = W = 1 of a chunk it then takes 6 m + N - 1, the least there can be. Fewer
    micro-batches run the order of 2N - 1, less those that are not there.

    Args:
        num_ranks: Ranks N of the pipeline; rank r has stages r and 2N - 1 - r.
        num_micro_batches: Micro-batches m of one step.

    Raises:
        InvalidArgumentError: Less than one of either.
    """
    return _v_shape("zb_v", num_ranks, num_micro_batches, 2 * num_ranks - 1, _zb_v)


def dualpipe_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Pairs of a forward and a backward of different micro-batches, one after the other, in a V.

    Source: DualPipe "cut in half", https://github.com/deepseek-ai/DualPipe. Every rank keeps at
    most 2N + 1 chunks' activations until their "B" or "W". With costs F = I = W = 1 of a chunk
    and m >= 2N it takes 6 m + N - 1. Fewer micro-batches run the order of 2N, less
    those that are not there.

    Args:
        num_ranks: Ranks N of the pipeline; rank r has stages r and 2N - 1 - r.
        num_micro_batches: Micro-batches m of one step.

    Raises:
        InvalidArgumentError: Less than one of either.
    """
    return _v_shape("dualpipe_v", num_ranks, num_micro_batches, 2 * num_ranks, _dualpipe_v)


_Order = Callable[[int, int, int], list[str]]  # (rank, ranks, micro-batches) -> kinds and chunks


def _v_shape(
    name: str, num_ranks: int, num_micro_batches: int, at_least: int, order: _Order
) -> Schedule:
    """Write the order for enough micro-batches and leave out those that are not there.

    Micro-batches do not need each other's results, so the rest of an order that finishes
    finishes too, no later and with no more kept alive.
    """
    require_sizes(num_ranks, num_micro_batches, num_chunks=2)
    enough = max(num_micro_batches, at_least)
    ranks = (_numbered(order(rank, num_ranks, enough)) for rank in range(num_ranks))
    left = tuple(tuple(a for a in rank if a.micro_batch < num_micro_batches) for rank in ranks)
    return Schedule(name, num_micro_batches, v_stages(num_ranks), left)


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
    """Give each kind and chunk its next micro-batch, and each "W" the oldest "I" without one."""
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

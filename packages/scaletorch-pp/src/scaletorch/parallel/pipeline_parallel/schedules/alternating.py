"""Schedules that alternate forwards and backwards: 1F1B, its zero-bubble form, and over chunks."""

from __future__ import annotations

from itertools import pairwise

from .making import looped_stages, of_kind, one_stage_each, require_sizes
from .schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Schedule


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Fill the pipeline, then alternate one forward with one backward, then drain it.

    Source: PipeDream-Flush, https://arxiv.org/abs/2006.09503. Rank r of N keeps the activations of
    at most N - r micro-batches.

    Args:
        num_ranks: Ranks of the pipeline, each with one stage.
        num_micro_batches: Micro-batches of one step; may be fewer than ranks.

    Raises:
        InvalidArgumentError: Less than one of either.
    """
    require_sizes(num_ranks, num_micro_batches)
    ranks = tuple(_one_f_one_b(rank, num_ranks, num_micro_batches) for rank in range(num_ranks))
    return Schedule("1f1b", num_micro_batches, one_stage_each(num_ranks), ranks)


def _one_f_one_b(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    ahead = min(num_ranks - rank - 1, num_micro_batches)
    actions = of_kind(FORWARD, range(ahead))
    for micro_batch in range(ahead, num_micro_batches):
        actions += [Action(FORWARD, micro_batch), Action(BACKWARD, micro_batch - ahead)]
    return (*actions, *of_kind(BACKWARD, range(num_micro_batches - ahead, num_micro_batches)))


def zb_h1(num_ranks: int, num_micro_batches: int) -> Schedule:
    """1F1B with the gradients of the weights put off, rank r's by r micro-batches.

    Source: ZB-H1 of zero bubble pipeline parallelism, https://arxiv.org/abs/2401.10241. Every rank
    keeps the activations of at most N micro-batches until their "W", as many as the first rank of
    1F1B. With costs F = I = W = 1 and m >= N it takes 3 m + N - 1, against 1F1B's 3 (m + N - 1).

    Args:
        num_ranks: Ranks N of the pipeline, each with one stage.
        num_micro_batches: Micro-batches m of one step; may be fewer than ranks.

    Raises:
        InvalidArgumentError: Less than one of either.
    """
    require_sizes(num_ranks, num_micro_batches)
    ranks = tuple(_zb_h1(rank, num_ranks, num_micro_batches) for rank in range(num_ranks))
    return Schedule("zb_h1", num_micro_batches, one_stage_each(num_ranks), ranks)


def _zb_h1(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    ahead = min(num_ranks - rank - 1, num_micro_batches)
    put_off = min(rank, num_micro_batches)
    actions = of_kind(FORWARD, range(ahead))
    for micro_batch in range(num_micro_batches):
        if micro_batch + ahead < num_micro_batches:
            actions.append(Action(FORWARD, micro_batch + ahead))
        actions.append(Action(BACKWARD_INPUT, micro_batch))
        if micro_batch >= put_off:
            actions.append(Action(BACKWARD_WEIGHT, micro_batch - put_off))
    last = range(num_micro_batches - put_off, num_micro_batches)
    return (*actions, *of_kind(BACKWARD_WEIGHT, last))


def interleaved_1f1b(num_ranks: int, num_micro_batches: int, num_chunks: int = 2) -> Schedule:
    """1F1B over chunks: rounds of N micro-batches pass each chunk in turn.

    Source: Megatron-LM, https://arxiv.org/abs/2104.04473. Where N does not divide the micro-batches
    the rounds are larger than N, by as little as can be, the largest first; one round holds fewer
    than N micro-batches. With costs f and b of a chunk and m >= N it takes (m v + N - 1) (f + b).
    Rank r keeps the activations of at most (v - 1) s + 2 (N - 1 - r) + 1 chunks for a first round
    of s; there are v times as many chunks as 1F1B's stages.

    Args:
        num_ranks: Ranks N of the pipeline; rank r has stages r, r + N, r + 2N and so on.
        num_micro_batches: Micro-batches m of one step.
        num_chunks: Stages v of each rank.

    Raises:
        InvalidArgumentError: Less than one of any.
    """
    require_sizes(num_ranks, num_micro_batches, num_chunks)
    stages = looped_stages(num_ranks, num_chunks)
    rounds = _rounds(num_ranks, num_micro_batches)
    forwards = _in_rounds(FORWARD, rounds, range(num_chunks))
    backwards = _in_rounds(BACKWARD, rounds, range(num_chunks)[::-1])
    ahead = (num_chunks - 1) * len(rounds[0])
    ranks = tuple(
        _one_by_one(forwards, backwards, ahead + 2 * (num_ranks - rank - 1))
        for rank in range(num_ranks)
    )
    return Schedule("interleaved_1f1b", num_micro_batches, stages, ranks)


def _rounds(num_ranks: int, num_micro_batches: int) -> list[range]:
    """Cut the micro-batches into as many rounds of N or more as there can be."""
    num_rounds = max(1, num_micro_batches // num_ranks)
    size, larger = divmod(num_micro_batches, num_rounds)
    ends = [index * size + min(index, larger) for index in range(num_rounds + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def _in_rounds(kind: str, rounds: list[range], chunks: range) -> list[Action]:
    return [Action(kind, m, chunk) for round_ in rounds for chunk in chunks for m in round_]


def _one_by_one(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    """Alternate, after so many forwards ahead, and end with as many backwards."""
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = (action for pair in pairs for action in pair)
    return (*forwards[:ahead], *steady, *backwards[len(backwards) - ahead :])

"""Backwards in two parts, so that the weights' part fills what would be bubble."""

from __future__ import annotations

from .schedule import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Schedule,
    of_kind,
    one_stage_each,
    require_sizes,
)


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
    ranks = tuple(_of_rank(rank, num_ranks, num_micro_batches) for rank in range(num_ranks))
    return Schedule("zb_h1", num_micro_batches, one_stage_each(num_ranks), ranks)


def _of_rank(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
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

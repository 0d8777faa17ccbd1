"""One forward, one backward."""

from __future__ import annotations

from .schedule import BACKWARD, FORWARD, Action, Schedule, of_kind, one_stage_each, require_sizes


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
    ranks = tuple(_of_rank(rank, num_ranks, num_micro_batches) for rank in range(num_ranks))
    return Schedule("1f1b", num_micro_batches, one_stage_each(num_ranks), ranks)


def _of_rank(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    ahead = min(num_ranks - rank - 1, num_micro_batches)
    actions = of_kind(FORWARD, range(ahead))
    for micro_batch in range(ahead, num_micro_batches):
        actions += [Action(FORWARD, micro_batch), Action(BACKWARD, micro_batch - ahead)]
    return (*actions, *of_kind(BACKWARD, range(num_micro_batches - ahead, num_micro_batches)))

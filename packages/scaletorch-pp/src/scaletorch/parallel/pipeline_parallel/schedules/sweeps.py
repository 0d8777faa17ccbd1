"""Schedules that sweep over all micro-batches at a time."""

from __future__ import annotations

from .schedule import BACKWARD, FORWARD, Schedule, of_kind, one_stage_each, require_sizes


def afab(num_ranks: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards, both in micro-batch order.

    Source: GPipe, https://arxiv.org/abs/1811.06965. Every rank keeps the activations of all
    micro-batches.

    Args:
        num_ranks: Ranks of the pipeline, each with one stage.
        num_micro_batches: Micro-batches of one step.

    Raises:
        InvalidArgumentError: Less than one of either.
    """
    require_sizes(num_ranks, num_micro_batches)
    micro_batches = range(num_micro_batches)
    actions = (*of_kind(FORWARD, micro_batches), *of_kind(BACKWARD, micro_batches))
    return Schedule("afab", num_micro_batches, one_stage_each(num_ranks), (actions,) * num_ranks)

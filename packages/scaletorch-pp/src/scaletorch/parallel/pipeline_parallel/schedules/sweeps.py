"""Schedules that sweep over all micro-batches at a time."""

from __future__ import annotations

from collections.abc import Sequence

from .making import looped_stages, of_kind, one_stage_each, require_sizes
from .schedule import BACKWARD, FORWARD, Action, Schedule


def forward_only(
    num_ranks: int, num_micro_batches: int, stages: Sequence[Sequence[int]] | None = None
) -> Schedule:
    """Run the forwards and nothing else, for inference.

    Nothing is kept alive for a backward. With costs F and one stage on each rank it takes
    (m + N - 1) F.

    Args:
        num_ranks: Ranks of the pipeline.
        num_micro_batches: Micro-batches of one step.
        stages: Each rank's stages, chunk by chunk; None is one each.

    Raises:
        InvalidArgumentError: Less than one of either.
    """
    require_sizes(num_ranks, num_micro_batches)
    places = one_stage_each(num_ranks) if stages is None else tuple(map(tuple, stages))
    ranks = tuple(_by_wave(own, num_micro_batches) for own in places)
    return Schedule("forward_only", num_micro_batches, places, ranks)


def _by_wave(stages: Sequence[int], num_micro_batches: int) -> tuple[Action, ...]:
    """Order a rank's forwards by the time at which, with a rank for each stage, they could run."""
    forwards = [
        (micro_batch + stage, stage, Action(FORWARD, micro_batch, chunk))
        for chunk, stage in enumerate(stages)
        for micro_batch in range(num_micro_batches)
    ]
    return tuple(action for _, _, action in sorted(forwards))


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


def looped_breadth_first(num_ranks: int, num_micro_batches: int, num_chunks: int = 2) -> Schedule:
    """All forwards chunk by chunk, then all backwards from the last chunk to the first.

    Source: breadth-first pipeline parallelism, https://arxiv.org/abs/2211.05953. Every rank keeps
    the activations of all micro-batches of all its chunks, and uses each chunk's weights in one go.

    Args:
        num_ranks: Ranks N of the pipeline; rank r has stages r, r + N, r + 2N and so on.
        num_micro_batches: Micro-batches of one step.
        num_chunks: Stages of each rank.

    Raises:
        InvalidArgumentError: Less than one of any.
    """
    require_sizes(num_ranks, num_micro_batches, num_chunks)
    stages = looped_stages(num_ranks, num_chunks)
    micro_batches = range(num_micro_batches)
    actions = [a for chunk in range(num_chunks) for a in of_kind(FORWARD, micro_batches, chunk)]
    for chunk in reversed(range(num_chunks)):
        actions += of_kind(BACKWARD, micro_batches, chunk)
    return Schedule("looped_bfs", num_micro_batches, stages, (tuple(actions),) * num_ranks)

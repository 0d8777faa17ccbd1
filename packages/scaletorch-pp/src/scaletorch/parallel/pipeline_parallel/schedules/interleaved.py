"""One forward, one backward, with several stages on each rank."""

from __future__ import annotations

from itertools import pairwise

from .chunks import looped_stages
from .schedule import BACKWARD, FORWARD, Action, Schedule, require_sizes


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

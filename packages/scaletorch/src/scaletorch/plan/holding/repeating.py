"""How many micro-batches it takes until a pipeline repeats itself: more of them hold no more.

Found by following many more of each schedule, which tests do again.
"""

from __future__ import annotations

from ...parallel.pipeline_parallel.building import IN_FLIGHT
from ..layout import V_SHAPED

LONG = 16  # ranks of a pipeline with ends and a middle, the ranks of which hold the same
ROUNDS = 2  # of interleaving until no more is kept
SENDING = 3  # of interleaving until no more is on its way, which takes `SENT` micro-batches too
SENT = IN_FLIGHT + 4


def enough(schedule: str, pp: int, micro_batches: int) -> int:
    """Return how many micro-batches keep as much alive as so many."""
    if schedule == "interleaved_1f1b":
        return rounds(pp, micro_batches, ROUNDS)
    if schedule in V_SHAPED:
        return min(micro_batches, 2 * pp)
    if schedule in ("1f1b", "zb_h1"):
        return min(micro_batches, pp)
    return micro_batches


def followed(schedule: str, pp: int, micro_batches: int) -> int:
    """Return how many micro-batches have as many messages under way as so many.

    But for sweeps ("looped_bfs"), of which all hidden states of one wait for the next: they are
    fewer bytes then than what is kept of them later, so that no rank is the fullest meanwhile.
    """
    if schedule == "interleaved_1f1b":
        return rounds(pp, micro_batches, max(SENDING, -(-SENT // pp)))
    few = pp + IN_FLIGHT + 1
    if schedule in V_SHAPED:
        few = max(few, 2 * pp + (schedule == "dualpipe_v"))
    return min(micro_batches, few)


def rounds(pp: int, micro_batches: int, most: int) -> int:
    """Return how many micro-batches have rounds as long as so many, but no more of each length."""
    number = max(1, micro_batches // pp)
    size, longer = divmod(micro_batches, number)
    return (size + 1) * min(longer, most) + size * min(number - longer, most)

"""A schedule checked, before any rank starts: it runs to its end and computes every gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from .schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Schedule
from .simulate import proven

# By how much an action changes the number of activations that its rank keeps.
KEPT = {FORWARD: 1, BACKWARD: -1, BACKWARD_INPUT: 0, BACKWARD_WEIGHT: -1}


@dataclass(frozen=True, slots=True)
class Report:
    """Memory, computations and messages of a schedule.

    Attributes:
        peak_live: For each rank the most activations, of one stage and micro-batch each, that it
            keeps at a time for their backward; 0 in a schedule of forwards only.
        actions: The number of actions of each kind, all ranks together.
        messages: The number of messages from one rank to another.
    """

    peak_live: tuple[int, ...]
    actions: Mapping[str, int]
    messages: int


def check(schedule: Schedule) -> Report:
    """Prove that a schedule is complete, in order, and free of deadlock.

    Each micro-batch must have, on each stage, one forward and (unless no stage has a backward) one
    backward, or one of inputs and then one of weights; and no ranks may wait for each other in a
    circle. The messages that `derive_messages` adds keep this so.

    Raises:
        ScheduleError: It is not; the message says why, and on which rank.
    """
    numbered, _ = proven(schedule)
    kinds = [[kind for kind, _, _ in actions] for actions in schedule.ranks]
    peaks = (max(accumulate(map(KEPT.__getitem__, rank)), default=0) for rank in kinds)
    return Report(
        peak_live=(0,) * schedule.num_ranks if numbered.forward_only else tuple(peaks),
        actions=sum(map(Counter, kinds), Counter[str]()),
        messages=len(numbered.crossings) * schedule.num_micro_batches,
    )

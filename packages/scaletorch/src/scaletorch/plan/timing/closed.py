"""When the ranks of a long pipeline are done, without playing its actions.

1F1B and "afab" are followed rank by rank, the others take the bubble of their papers for the mean
stage; the tests hold both against `simulate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

LONG = 256  # forwards of all ranks together, from which a schedule is not simulated


class Times(Protocol):
    """Seconds of a stage."""

    @property
    def forward(self) -> float:
        """Of a micro-batch."""
        ...

    @property
    def backward(self) -> float:
        """Of a micro-batch."""
        ...

    @property
    def weights(self) -> float:
        """Of the backward, for the gradients of weights."""
        ...


def makespan(
    name: str, chunks: int, micro_batches: int, stages: Sequence[Times], message: float
) -> list[float]:
    """Return when each rank of a pipeline ends its last action; as `pipelines.ends`."""
    if name == "1f1b":
        whole = _one_f_one_b(micro_batches, stages, message)
    elif name == "afab":
        whole = _afab(micro_batches, stages, message)
    else:
        whole = _by_bubble(name, chunks, micro_batches, stages, message)
    ranks = len(stages) // chunks
    if name in ("zb_v", "dualpipe_v", "zb_h1"):
        return [whole] * ranks  # what is put off fills their last gaps
    # The last backward goes up the ranks to the first.
    drained = accumulate((each.backward + message for each in stages[: ranks - 1]), initial=0.0)
    return [whole - since for since in drained]


def _afab(micro_batches: int, stages: Sequence[Times], message: float) -> float:
    forwards, backwards = [s.forward for s in stages], [s.backward for s in stages]
    fill = sum(forwards) + sum(backwards) + 2 * (len(stages) - 1) * message
    return fill + (micro_batches - 1) * (max(forwards) + max(backwards))


def _one_f_one_b(micro_batches: int, stages: Sequence[Times], message: float) -> float:
    """Return the longest of the paths that stay on one rank, or go to and fro between ranks.

    A rank begins when the first micro-batch has come down to it, waits for the first to come back
    from the ranks behind, and at the end once more for the last. Between, ranks s to e hand each
    other a micro-batch in each of e - s + 1 rounds: if messages take time, that is their period.
    """
    size = len(stages)
    whole = [s.forward + s.backward for s in stages]
    before = [0.0, *accumulate(whole)]
    longest = 0.0
    for at, each in enumerate(stages):
        behind = size - at - 1
        beyond = before[-1] - before[at + 1] + 2 * behind * message
        own = micro_batches * whole[at]
        if micro_batches > behind + 1:
            own += max(0.0, beyond - behind * each.forward)
            own += max(0.0, beyond - behind * each.backward)
            ends = {size - 1, min(at + 1, size - 1), min(at + 2, size - 1)}
            period = max(
                (before[end + 1] - before[at] + 2 * (end - at) * message) / (end - at + 1)
                for end in ends
            )
            own += (micro_batches - behind - 1) * max(0.0, period - whole[at])
        else:
            last = beyond + micro_batches * each.forward + each.backward
            own = max(own, beyond + each.forward + micro_batches * each.backward, last)
        longest = max(longest, before[at] + 2 * at * message + own)
    return longest


def _by_bubble(
    name: str, chunks: int, micro_batches: int, stages: Sequence[Times], message: float
) -> float:
    ranks = len(stages) // chunks
    whole = [s.forward + s.backward for s in stages]
    if name == "looped_bfs":  # a sweep of a chunk at a time
        busy = sum(max(whole[at : at + ranks]) for at in range(0, len(whole), ranks))
    elif name in ("zb_v", "dualpipe_v"):
        busy = max(whole[rank] + whole[-1 - rank] for rank in range(ranks))
    else:
        busy = max(sum(whole[rank::ranks]) for rank in range(ranks))
    busy *= micro_batches
    forward = sum(stage.forward for stage in stages) / len(stages)
    backward = sum(stage.backward for stage in stages) / len(stages)
    weights = sum(stage.weights for stage in stages) / len(stages)
    waits = ranks - 1
    if name == "zb_h1":
        bubble = waits * max(0.0, forward + backward - 2 * weights)
        bubble += max(0, ranks - micro_batches) * weights
    elif name in ("zb_v", "dualpipe_v"):
        bubble = waits * max(0.0, forward + backward - 2 * weights)
        late = max(0, 2 * ranks - 1 - micro_batches)
        bubble += (2 if name == "dualpipe_v" else 1) * late * weights
    else:  # too few micro-batches wait in every round for the ranks behind
        late = (chunks - 1) * max(0, ranks - micro_batches)
        bubble = (waits + late) * (forward + backward)
    return busy + bubble + 2 * chunks * waits * message

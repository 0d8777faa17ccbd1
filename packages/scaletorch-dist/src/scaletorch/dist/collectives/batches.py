"""Many messages cut into batches, since a backend takes only so many at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch.distributed as c10d
from torch.distributed import P2POp

MOST = 128  # messages in one batch: NCCL cuts longer ones, not at the same places on both ends

Round = tuple[int, int]


def batches(operations: Sequence[P2POp], place: int, size: int) -> Iterator[list[int]]:
    """Yield the indices of a rank's messages in batches of at most `MOST`.

    A rank knows only its own messages, and may have to cut where the other end does not. So the
    ends share an order and not the places of the cuts. Message k from a rank to the one d places
    on belongs to round (k, (d - 1) // 64), which both ends can tell. A rank has at most 64 sends
    and 64 receives of a round. It posts its rounds in ascending order and divides none of them.

    This cannot deadlock. Take the lowest round that is not complete on all ranks: on both ends of
    each of its messages all batches before have lower rounds, which are complete, so the message
    has been started on both. A batch of several rounds only starts some earlier than it must. NCCL
    has the same order within a batch: it runs the second message to a rank after the first one.

    Args:
        operations: Sends and receives of this rank, between two ranks in the order of the messages.
        place: This rank's place in the group.
        size: Ranks of the group.
    """
    counts: Counter[tuple[Any, int]] = Counter()
    rounds: list[tuple[Round, int]] = []
    for index, operation in enumerate(operations):
        steps = operation.group_peer - place
        distance = (steps if operation.op is c10d.isend else -steps) % size
        path = operation.op, operation.group_peer
        rounds.append(((counts[path], (distance - 1) // (MOST // 2)), index))
        counts[path] += 1
    batch: list[int] = []
    for _, members in groupby(sorted(rounds), key=lambda each: each[0]):
        added = [index for _, index in members]
        if len(batch) + len(added) > MOST:
            yield batch
            batch = []
        batch += added
    yield batch

"""Messages under way between the ranks of a pipeline: receives posted, sends completed late."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....dist import Work, exchange, irecv, isend
from ...pg_manager.building import has_streams

IN_FLIGHT = 8  # sends under way before the first is waited for: what they hold stays in memory


def goes_in_batches(group: ProcessGroup | None) -> bool:
    """Return whether a group's messages go in batches, since a stream of its device runs them."""
    return group is not None and has_streams(group)


def neighbours(stages: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the pairs of places in a pipeline that exchange hidden states, each once.

    Args:
        stages: Each rank's stages, chunk by chunk.
    """
    homes = {stage: place for place, own in enumerate(stages) for stage in own}
    crossings = ({homes[stage], homes[stage + 1]} for stage in range(len(homes) - 1))
    return sorted({(min(each), max(each)) for each in crossings if len(each) == 2})


class Parcel(NamedTuple):
    """Tensors on their way to this rank; they are there once all works are done."""

    works: list[Work[None]]
    tensors: list[Tensor]


class Posts:
    """Starts messages, and holds the tensors that are sent until they are through.

    On the CPU each message is on its own, and the order of receives among sends does not matter. On
    devices with streams the messages between two actions go as one batch, in the order of the
    program, which is one order for all ranks.

    Args:
        ranks: Global ranks of the pipeline, in order.
        group: Their process group; None in one process.
        device: Device on which tensors are received.
    """

    def __init__(
        self, ranks: Sequence[int], group: ProcessGroup | None, device: torch.device
    ) -> None:
        self.device = device
        self._ranks, self._group = ranks, group
        self.in_batches = goes_in_batches(group)
        self._under_way: deque[tuple[Work[None], Sequence[Tensor]]] = deque()
        self._batch: tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]]] = [], []
        self._waiting: list[Parcel] = []

    def send(self, tensor: Tensor, peer: int) -> None:
        """Begin to send to a rank of the pipeline, or with the next `flush`."""
        tensor = tensor.detach().contiguous()  # also from the graph, which may go before it is sent
        if self.in_batches:
            self._gather(0, tensor, peer)
        else:
            self._hold(isend(tensor, self._ranks[peer], self._group), [tensor])

    def receive(self, tensors: list[Tensor], peer: int) -> Parcel:
        """Begin to receive from a rank of the pipeline, or with the next `flush`."""
        if not self.in_batches:
            source = self._ranks[peer]
            return Parcel([irecv(tensor, source, self._group) for tensor in tensors], tensors)
        parcel = Parcel([], tensors)
        for tensor in tensors:
            self._gather(1, tensor, peer)
            self._waiting.append(parcel)
        return parcel

    def flush(self) -> None:
        """Begin with the messages gathered for a batch."""
        sends, receives = self._batch
        if sends or receives:
            work = exchange(sends, receives, self._group, async_op=True)
            self._hold(work, [tensor for tensor, _ in sends])
            for parcel in self._waiting:
                parcel.works.append(work)
            self._batch, self._waiting = ([], []), []

    def finish(self) -> None:
        """Wait until all that was sent is through."""
        while self._under_way:
            self._finish_first()

    def _gather(self, side: int, tensor: Tensor, peer: int) -> None:
        """Add a message to the batch, or to the next one if it has one of that rank already.

        NCCL runs the second message to a rank after the first one from there, which may be an
        answer to the second.
        """
        if any(other == self._ranks[peer] for _, other in self._batch[side]):
            self.flush()
        self._batch[side].append((tensor, self._ranks[peer]))

    def _hold(self, work: Work[None], tensors: Sequence[Tensor]) -> None:
        self._under_way.append((work, tensors))
        if len(self._under_way) > IN_FLIGHT:
            self._finish_first()

    def _finish_first(self) -> None:
        work, kept = self._under_way.popleft()
        work.wait()
        del kept  # not before: the backend need not hold what it sends

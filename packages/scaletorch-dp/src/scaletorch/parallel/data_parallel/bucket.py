"""Buckets: flat buffers that many gradients share, each reduced over the group by one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...dist import all_reduce, get_comm_device
from ...dist.collectives.work import Work
from .slot import Slot

UNUSED, USED, LATE = 0, 1, 2  # what a rank says of a parameter; the largest over ranks counts


class Bucket:
    """Gradients of one dtype and device that travel together.

    Args:
        slots: The parameters' slots, in the order of the buffer.
        dtype: The buffer's dtype.
    """

    def __init__(self, slots: Sequence[Slot], dtype: torch.dtype) -> None:
        self.slots = tuple(slots)
        self.dtype = dtype
        self.elements = sum(slot.parameter.numel() for slot in self.slots)
        self.launched = False
        self._views: list[Tensor] = []
        self._used: dict[int, bool] = {}
        self._work: Work[None] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget what is ready and what is under way."""
        self.launched = False
        self._missing = {slot.index for slot in self.slots}
        self._views, self._used, self._work = [], {}, None

    def mark_ready(self, index: int) -> None:
        """Note that a parameter has its gradient."""
        self._missing.discard(index)

    @property
    def ready(self) -> bool:
        """Whether every parameter has its gradient."""
        return not self._missing

    @torch.no_grad()
    def launch(self, op: str, group: ProcessGroup | None) -> None:
        """Move the gradients into a new buffer, zeros where there is none, and start reducing.

        The buffer is new each time, since ``parameter.grad`` views the last one.
        """
        device = self.slots[0].parameter.device
        buffer = torch.empty(self.elements, dtype=self.dtype, device=device)
        parts = buffer.split([slot.parameter.numel() for slot in self.slots])
        for slot, part in zip(self.slots, parts, strict=True):
            view = part.view(slot.parameter.shape)
            local = slot.take()
            self._used[slot.index] = local is not None
            self._views.append(view.zero_() if local is None else view.copy_(local))
        if self.elements:
            self._work = all_reduce(buffer, op, group=group, async_op=True)
        self.launched = True

    def flag(self, slot: Slot) -> int:
        """Say what this rank did with a parameter of this bucket."""
        if slot.local:  # a gradient came after the launch
            return LATE
        return USED if self._used[slot.index] else UNUSED

    def finish(self, flags: Sequence[int]) -> None:
        """Wait for the reduction and write the gradients; unused everywhere ones stay."""
        if self._work is not None:
            self._work.wait()
        for slot, view in zip(self.slots, self._views, strict=True):
            slot.give(view if flags[slot.index] else None)
        self.reset()


class BucketManager:
    """Reduces slots over a group in buckets, in one order on every rank.

    A bucket is launched only after all before it, so that ranks that use different parameters
    still issue the same calls in the same order.

    Args:
        slots: All trainable parameters' slots, in registration order.
        buckets: Buckets over the slots, in the order of their launches; see `fill_buckets`.
        op: ``"sum"`` or ``"mean"`` over the group.
        group: The process group to reduce over.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        buckets: Sequence[Bucket],
        op: str,
        group: ProcessGroup | None,
    ) -> None:
        self.slots = tuple(slots)
        self.buckets = tuple(buckets)
        self._op = op
        self._group = group
        self._next = 0
        self._bucket_of = {slot.index: bucket for bucket in self.buckets for slot in bucket.slots}

    def mark_ready(self, index: int, launch: bool = True) -> None:
        """Note that a parameter has its gradient, and launch the buckets that are due."""
        self._bucket_of[index].mark_ready(index)
        while launch and self._next < len(self.buckets) and self.buckets[self._next].ready:
            self.buckets[self._next].launch(self._op, self._group)
            self._next += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Launch what is left, wait for all, and write every gradient.

        One more, small reduction tells which parameters any rank used: one int32 for each. A
        parameter that a reentrant checkpoint used again after its bucket had left is reduced in
        a second round.
        """
        try:
            buckets = self.buckets
            while buckets:
                for bucket in buckets:
                    if not bucket.launched:
                        bucket.launch(self._op, self._group)
                flags = self._agree(buckets)
                for bucket in buckets:
                    bucket.finish(flags)
                buckets = tuple(
                    bucket
                    for bucket in buckets
                    if any(flags[slot.index] == LATE for slot in bucket.slots)
                )
        finally:
            self.reset()

    def reset(self) -> None:
        """Forget what is ready and under way; gradients are not touched."""
        self._next = 0
        for bucket in self.buckets:
            bucket.reset()

    def info(self) -> list[dict[str, object]]:
        """Describe the buckets in the order of their launches, as plain data."""
        return [
            {
                "parameters": [slot.name for slot in bucket.slots],
                "elements": bucket.elements,
                "dtype": str(bucket.dtype),
            }
            for bucket in self.buckets
        ]

    def _agree(self, buckets: Iterable[Bucket]) -> list[int]:
        """Return for each slot the largest flag of any rank."""
        flags = [UNUSED] * len(self.slots)
        for bucket in buckets:
            for slot in bucket.slots:
                flags[slot.index] = bucket.flag(slot)
        shared = torch.tensor(flags, dtype=torch.int32, device=get_comm_device(self._group))
        all_reduce(shared, "max", group=self._group)
        result: list[int] = shared.tolist()
        return result


def fill_buckets(
    slots: Iterable[Slot], bucket_size: int, grad_type: torch.dtype | None
) -> list[Bucket]:
    """Part slots, in the order given, into buckets of at most ``bucket_size`` elements.

    A bucket has one dtype and one device, and at least one parameter, however large. Buckets come
    in the order in which their last parameters do.
    """
    members: list[tuple[torch.dtype, list[Slot]]] = []
    current: dict[tuple[torch.dtype, torch.device], list[Slot]] = {}
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    place: dict[int, int] = {}
    for slot in slots:
        place[slot.index] = len(place)
        key = (_buffer_dtype(slot, grad_type), slot.parameter.device)
        elements = slot.parameter.numel()
        if elements > room.get(key, -1):
            current[key], room[key] = [], bucket_size
            members.append((key[0], current[key]))
        current[key].append(slot)
        room[key] -= elements
    members.sort(key=lambda entry: place[entry[1][-1].index])
    return [Bucket(each, dtype) for dtype, each in members]


def _buffer_dtype(slot: Slot, grad_type: torch.dtype | None) -> torch.dtype:
    """Return the dtype a gradient travels in; ``grad_type`` is for real floating ones."""
    dtype = slot.parameter.dtype
    return dtype if grad_type is None or not dtype.is_floating_point else grad_type

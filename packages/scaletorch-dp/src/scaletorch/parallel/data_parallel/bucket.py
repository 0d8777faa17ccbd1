"""Buckets: flat buffers in which gradients live, each reduced over the group by one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...dist import Work, all_reduce, broadcast, get_comm_device, group_ranks
from .finite import first_nonfinite, raise_nonfinite
from .reduction import Reduction
from .slot import Slot

# What a rank says of a parameter; the largest over ranks counts.
UNUSED, USED, LATE, NONFINITE = 0, 1, 2, 3
FIRST_SIZE = 2**18  # most elements in the first bucket: its reduction begins early in backward


class Bucket:
    """Gradients of one dtype and device that travel together.

    Its buffer is used again and again, but for as long as anybody holds a view of it, such as a
    gradient of the step before: then a new one takes its place.

    Args:
        slots: The parameters' slots, in the order of the buffer.
        dtype: The buffer's dtype.
        multiple: The buffer's length is one of this; what is behind the last gradient is zero.
    """

    def __init__(self, slots: Sequence[Slot], dtype: torch.dtype, multiple: int = 1) -> None:
        self.slots = tuple(slots)
        self.dtype = dtype
        self.elements = sum(slot.parameter.numel() for slot in self.slots)
        self.length = -(-self.elements // multiple) * multiple
        self.launched = False
        self._places = dict(zip((s.index for s in self.slots), self._starts(), strict=True))
        self._buffer: Tensor | None = None  # where this rank's own gradients are
        self._sent: Tensor | None = None  # what the reduction that is under way reads and writes
        self._spare: Tensor | None = None  # the last one, to be used again
        self._used: dict[int, int] = {}
        self._work: Work[Tensor] | None = None
        self._before: Tensor | None = None
        self._missing: set[int] = set()
        for slot in self.slots:
            slot.buffer_dtype = dtype
        self.reset()

    def reset(self) -> None:
        """Forget what is ready and what is under way."""
        self.launched = False
        self._missing = set(self._places)
        self._used, self._work, self._before = {}, None, None
        self._buffer = self._sent = None

    def open(self) -> None:
        """Look, when a backward begins, at what became of the gradients since the last."""
        for slot in self.slots:
            slot.open()

    def clear(self) -> None:
        """Forget all gradients."""
        for slot in self.slots:
            slot.clear()

    def place(self, slot: Slot) -> Tensor:
        """Return the memory of one parameter's gradient; its values are arbitrary."""
        start = self._places[slot.index]
        part = self._own_buffer()[start : start + slot.parameter.numel()]
        return part.view(slot.parameter.shape)

    def mark_ready(self, index: int) -> None:
        """Note that a parameter has its gradient."""
        self._missing.discard(index)

    @property
    def ready(self) -> bool:
        """Whether every parameter has its gradient."""
        return not self._missing

    @torch.no_grad()
    def launch(self, reduction: Reduction, *, check_finite: bool = False) -> None:
        """Start reducing the buffer, zero where this rank has no gradient."""
        for slot in self.slots:
            used = slot.take(self.place(slot))
            self._used[slot.index] = USED if used else UNUSED
        buffer, self._buffer = self._own_buffer(), None
        buffer[self.elements :] = 0
        if check_finite:
            for slot in first_nonfinite(self.slots, self._parts(buffer)):
                self._used[slot.index] = NONFINITE
        self._before = self._held(buffer) if reduction.ordered else None
        self._work = self._start(reduction, buffer)
        self._sent = buffer
        self.launched = True

    def collect(self) -> None:
        """Wait for the reduction, and give up the buffer."""
        if self._work is not None:
            reduced = self._work.wait()
            self._work, self._sent = Work((), lambda: reduced), None

    def flag(self, slot: Slot) -> int:
        """Say what this rank did with a parameter of this bucket."""
        if slot.local:  # a gradient came after the launch
            return LATE
        return self._used[slot.index]

    def finish(self, flags: Sequence[int]) -> None:
        """Wait for the reduction and write the gradients; unused everywhere ones stay."""
        if self._work is not None:
            self._give(self._work.wait(), flags)
            self._spare, self._sent = self._sent, None
        self.launched = False
        self._missing = set(self._places)
        self._used, self._work, self._before = {}, None, None

    def describe(self) -> dict[str, object]:
        """Describe the bucket as plain data."""
        names = [slot.name for slot in self.slots]
        return {"parameters": names, "elements": self.elements, "dtype": str(self.dtype)}

    def _start(self, reduction: Reduction, buffer: Tensor) -> Work[Tensor]:
        return reduction.whole(buffer, self._before)

    def _give(self, reduced: Tensor, flags: Sequence[int]) -> None:
        for slot, part in self._parts(reduced):
            used = flags[slot.index] != UNUSED
            slot.give(part if used else None, with_held=self._before is not None)

    def _held(self, buffer: Tensor) -> Tensor | None:
        """Return the synchronised gradients from before, in the buffer's order, if any."""
        if all(slot.held is None for slot in self.slots):
            return None
        before = torch.zeros_like(buffer)
        for slot, part in self._parts(before):
            if slot.held is not None:
                part.copy_(slot.held)
        return before

    def _parts(self, buffer: Tensor) -> Iterator[tuple[Slot, Tensor]]:
        for slot in self.slots:
            start, parameter = self._places[slot.index], slot.parameter
            yield slot, buffer[start : start + parameter.numel()].view(parameter.shape)

    def _starts(self) -> Iterator[int]:
        start = 0
        for slot in self.slots:
            yield start
            start += slot.parameter.numel()

    def _own_buffer(self) -> Tensor:
        if self._buffer is None:
            spare, self._spare = self._spare, None
            if spare is None or _is_shared(spare):
                device = self.slots[0].parameter.device
                spare = torch.empty(self.length, dtype=self.dtype, device=device)
            self._buffer = spare
        return self._buffer


class BucketManager:
    """Reduces slots over a group in buckets, in one order on every rank.

    A bucket is launched only after all before it, so that ranks that use different parameters
    still issue the same calls in the same order.

    Args:
        slots: All trainable parameters' slots, in registration order.
        fill: Puts slots into buckets, in the order of their launches; see `fill_buckets`.
        reduction: How buffers are reduced.
        check_finite: Whether gradients that are not finite are found before they travel.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        fill: Callable[[Iterable[Slot]], list[Bucket]],
        reduction: Reduction,
        *,
        check_finite: bool = False,
    ) -> None:
        self.slots = tuple(slots)
        self.fill = fill
        self.reduction = reduction
        self.order: list[int] | None = []  # of the first backward; None once it is known
        self.eager = False  # whether every backward sums into shards, and keeps no buffer
        self._check_finite = check_finite
        # Backward makes gradients in about the reverse order of registration.
        self.use_buckets(fill(reversed(self.slots)))

    def use_buckets(self, buckets: Iterable[Bucket]) -> None:
        """Take other buckets over the same slots; nothing may be under way."""
        self.buckets = tuple(buckets)
        self._next = 0
        self._bucket_of = {slot.index: bucket for bucket in self.buckets for slot in bucket.slots}

    def use_settled(self, buckets: Iterable[Bucket]) -> None:
        """Take buckets that no first backward will fill anew: their parts belong to ranks."""
        self.use_buckets(buckets)
        self.order = None

    def open(self) -> None:
        """Look, when a backward begins, at what became of the gradients since the last."""
        for bucket in self.buckets:
            bucket.open()

    def place(self, slot: Slot) -> Tensor:
        """Return the memory of one parameter's gradient; its values are arbitrary."""
        return self._bucket_of[slot.index].place(slot)

    def mark_ready(self, index: int, launch: bool = True) -> None:
        """Note that a parameter has its gradient, and launch the buckets that are due."""
        if self.order is not None:
            self.order.append(index)
        self._bucket_of[index].mark_ready(index)
        while launch and self._next < len(self.buckets) and self.buckets[self._next].ready:
            self._launch(self.buckets[self._next])
            self._next += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Launch what is left, wait for all, and write every gradient.

        One more, small reduction tells which parameters any rank used: one int32 for each. A
        parameter that a reentrant checkpoint used again after its bucket had left is reduced in
        a second round.

        Raises:
            NonFiniteError: Some rank's gradient is not finite, and that was to be checked.
        """
        try:
            buckets = self.buckets
            while buckets:
                for bucket in buckets:
                    if not bucket.launched:
                        self._launch(bucket)
                flags = self._agree(buckets)
                for bucket in buckets:
                    bucket.finish(flags)
                buckets = tuple(
                    bucket
                    for bucket in buckets
                    if any(flags[slot.index] == LATE for slot in bucket.slots)
                )
            self._reorder()
        finally:
            self.reset()

    def reset(self) -> None:
        """Forget what is ready and under way; gradients are not touched."""
        self._next = 0
        for bucket in self.buckets:
            bucket.reset()

    def clear(self) -> None:
        """Forget all gradients."""
        for bucket in self.buckets:
            bucket.clear()

    def info(self) -> list[dict[str, object]]:
        """Describe the buckets in the order of their launches, as plain data."""
        return [bucket.describe() for bucket in self.buckets]

    def _launch(self, bucket: Bucket) -> None:
        bucket.launch(self.reduction, check_finite=self._check_finite)
        at = self.buckets.index(bucket)
        if self.eager and at > 0 and self.buckets[at - 1].launched:
            self.buckets[at - 1].collect()

    def _agree(self, buckets: Iterable[Bucket]) -> list[int]:
        """Return for each slot the largest flag of any rank."""
        flags = [UNUSED] * len(self.slots)
        for bucket in buckets:
            for slot in bucket.slots:
                flags[slot.index] = bucket.flag(slot)
        group = self.reduction.group
        shared = torch.tensor(flags, dtype=torch.int32, device=get_comm_device(group))
        all_reduce(shared, "max", group=group)
        result: list[int] = shared.tolist()
        if NONFINITE in result:
            self._refuse(flags)
        return result

    def _refuse(self, flags: Sequence[int]) -> NoReturn:
        """Drop all gradients, and raise on every rank."""
        for bucket in self.buckets:
            bucket.finish([UNUSED] * len(self.slots))
            bucket.clear()
        names = [slot.name for slot in self.slots if flags[slot.index] == NONFINITE]
        raise_nonfinite(names, self.reduction.group)

    def _reorder(self) -> None:
        """Fill the buckets anew in the order in which the first backward made the gradients."""
        if self.order is None:
            return
        rest = [slot.index for slot in reversed(self.slots)]
        found = list(dict.fromkeys([*self.order, *rest]))
        self.order = None
        group = self.reduction.group
        if self.reduction.size > 1 and found:  # ranks may differ: the first one's order counts
            shared = torch.tensor(found, device=get_comm_device(group))
            broadcast(shared, group_ranks(group)[0], group=group)
            found = shared.tolist()
        if found != [slot.index for bucket in self.buckets for slot in bucket.slots]:
            self.use_buckets(self.fill(self.slots[index] for index in found))


def fill_buckets(
    slots: Iterable[Slot], bucket_size: int, grad_type: torch.dtype | None, multiple: int = 1
) -> list[Bucket]:
    """Part slots, in the order given, into buckets of at most ``bucket_size`` elements.

    A bucket has one dtype and one device, and at least one parameter, however large. The first
    is small, so that its reduction begins early. Buckets come in the order in which their last
    parameters do.
    """
    members: list[tuple[torch.dtype, list[Slot]]] = []
    current: dict[Any, list[Slot]] = {}
    room: dict[Any, int] = {}
    place: dict[int, int] = {}
    for slot in slots:
        place[slot.index] = len(place)
        dtype = _buffer_dtype(slot, grad_type)
        key = (dtype, slot.parameter.dtype, slot.parameter.device)
        elements = slot.parameter.numel()
        if elements > room.get(key, -1):
            current[key], room[key] = (
                [],
                min(bucket_size, FIRST_SIZE if not members else bucket_size),
            )
            members.append((dtype, current[key]))
        current[key].append(slot)
        room[key] -= elements
    members.sort(key=lambda entry: place[entry[1][-1].index])
    return [Bucket(each, dtype, multiple) for dtype, each in members]


def _buffer_dtype(slot: Slot, grad_type: torch.dtype | None) -> torch.dtype:
    """Return the dtype a gradient is kept in; ``grad_type`` is for real floating ones."""
    dtype = slot.parameter.dtype
    return dtype if grad_type is None or not dtype.is_floating_point else grad_type


def _is_shared(buffer: Tensor) -> bool:
    """Return whether another tensor has this one's memory."""
    # The tensor itself and the storage's Python object are two.
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) > 2

"""A bucket: a flat buffer of gradients, reduced over the group by one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ....dist import Work
from .reduction import Reduction
from .slot import Slot

# A rank's flag for each parameter; the maximum over ranks counts.
UNUSED, USED, NONFINITE, LATE = 0, 1, 2, 3


class Bucket:
    """Gradients of one dtype and device that travel together.

    The buffer is reused, unless a view of it is still alive, such as a gradient of the last step:
    then a new buffer takes its place.

    Args:
        slots: The parameters' slots, in the order of the buffer.
        dtype: The buffer's dtype.
        multiple: The buffer's length is a multiple of this; zeros follow the last gradient.
    """

    def __init__(self, slots: Sequence[Slot], dtype: torch.dtype, multiple: int = 1) -> None:
        self.slots = tuple(slots)
        self.dtype = dtype
        self.elements = sum(slot.parameter.numel() for slot in self.slots)
        self.length = -(-self.elements // multiple) * multiple
        self.launched = False
        self.keeps_buffer = True
        starts = accumulate((slot.parameter.numel() for slot in self.slots), initial=0)
        self._places = dict(zip((slot.index for slot in self.slots), starts, strict=False))
        self._buffer: Tensor | None = None  # this rank's own gradients
        self._sent: Tensor | None = None  # the buffer of the reduction in flight
        self._spare: Tensor | None = None  # the last buffer, for reuse
        for slot in self.slots:
            slot.buffer_dtype = dtype
        self.reset()

    def _begin(self) -> None:
        """Prepare for another backward; keep gradients that have already arrived."""
        self.launched = False
        self._missing = set(self._places)
        self._used: dict[int, int] = {}
        self._finite: Tensor | None = None  # bool, one for each slot
        self._work: Work[Tensor] | None = None

    def convert(self, dtype: torch.dtype) -> None:
        """Hold gradients in another dtype from now on, and follow parameters' new dtypes."""
        self.dtype = dtype
        self._buffer = self._spare = None
        for slot in self.slots:
            slot.convert(dtype)

    def reset(self) -> None:
        """Forget which gradients are ready, and the reduction in flight."""
        self._begin()
        self._buffer = self._sent = None

    def open(self) -> int:
        """Follow the user's changes to gradients since the last backward, when one begins.

        Return the number of this rank's own gradients that were dropped or zeroed.
        """
        return sum([slot.open() for slot in self.slots])

    def clear(self) -> None:
        """Forget all gradients."""
        for slot in self.slots:
            slot.clear()

    def place(self, slot: Slot) -> Tensor:
        """Return the memory of one parameter's gradient; its values are arbitrary."""
        start = self._places[slot.index]
        memory = self._own_buffer()[start : start + slot.parameter.numel()]
        return memory.view(slot.parameter.shape)

    def mark_ready(self, index: int) -> None:
        """Note that a parameter has its gradient."""
        self._missing.discard(index)

    @property
    def ready(self) -> bool:
        """True if every parameter has its gradient."""
        return not self._missing

    @torch.no_grad()
    def launch(self, reduction: Reduction, *, check_finite: bool = False) -> None:
        """Start reducing the buffer, with zeros for parameters without one on this rank."""
        for slot in self.slots:
            used = slot.take(self.place(slot))
            self._used[slot.index] = USED if used else UNUSED
        buffer, self._buffer = self._own_buffer(), None
        buffer[self.elements :] = 0
        if check_finite:
            self._finite = torch.stack([_is_finite(view) for _, view in self._views(buffer)])
        self._work = self._start(reduction, buffer)
        self._sent = buffer
        self.launched = True

    def collect_if_done(self) -> bool:
        """Free memory that only the reduction needed, if it has ended; never wait for it.

        Return whether nothing is left to free.
        """
        return True

    def flag(self, slot: Slot) -> int:
        """Return this rank's flag of a parameter of this bucket."""
        if self._finite is not None:
            self._note_nonfinite(self._finite.tolist())
        if slot.local:  # a gradient came after the launch
            return LATE
        return self._used.get(slot.index, UNUSED)

    def wait(self) -> None:
        """Wait for the reduction."""
        if self._work is not None:
            self._work.wait()

    def finish(self, flags: Sequence[int]) -> None:
        """Write the reduced gradients; gradients that no rank used stay."""
        if self._work is not None:
            self._give(self._work.wait(), flags)
            self._reuse()
        self._begin()

    def describe(self) -> dict[str, object]:
        """Describe the bucket as plain data."""
        names = [slot.name for slot in self.slots]
        return {"parameters": names, "elements": self.elements, "dtype": str(self.dtype)}

    def _reuse(self) -> None:
        """Keep the buffer of the finished reduction for the next backward."""
        if self._sent is not None and self.keeps_buffer:
            self._spare = self._sent
        self._sent = None

    def _note_nonfinite(self, finite: Sequence[bool]) -> None:
        for slot, fine in zip(self.slots, finite, strict=True):
            if not fine:
                self._used[slot.index] = NONFINITE
        self._finite = None

    def _start(self, reduction: Reduction, buffer: Tensor) -> Work[Tensor]:
        return reduction.whole(buffer)

    def _give(self, reduced: Tensor, flags: Sequence[int]) -> None:
        for slot, view in self._views(reduced):
            slot.give(view if flags[slot.index] != UNUSED else None)

    def _views(self, buffer: Tensor) -> Iterator[tuple[Slot, Tensor]]:
        for slot in self.slots:
            start, parameter = self._places[slot.index], slot.parameter
            yield slot, buffer[start : start + parameter.numel()].view(parameter.shape)

    def _own_buffer(self) -> Tensor:
        if self._buffer is None:
            spare, self._spare = self._spare, None
            if spare is None or _is_shared(spare):
                device = self.slots[0].parameter.device
                spare = torch.empty(self.length, dtype=self.dtype, device=device)
            self._buffer = spare
        return self._buffer


def _is_finite(gradient: Tensor) -> Tensor:
    """Return whether all elements are finite, 0-d bool; the host does not wait."""
    if not gradient.numel():
        return torch.ones((), dtype=torch.bool, device=gradient.device)
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    # The largest magnitude takes one pass and no memory, and does not overflow as a sum can.
    largest: Tensor = torch.linalg.vector_norm(real, torch.inf)
    return largest.isfinite()


def _is_shared(buffer: Tensor) -> bool:
    """Return whether another tensor uses this one's memory."""
    # The tensor and the storage's Python object count as two.
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) > 2

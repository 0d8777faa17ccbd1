"""A bucket: the gradients of some parameters in a flat buffer, reduced over ranks by one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ....dist import Work, get_rank, get_world_size
from ....dist.building import all_gather_flat, all_reduce_flat, reduce_scatter_flat, sum_dtype
from ....dist.errors import InvalidArgumentError, StateError
from ...pg_manager import describe_rank

OPS = ("sum", "mean")


@dataclass(frozen=True)
class Reduction:
    """The options of a reduction."""

    op: str  # "sum" or "mean" over the group
    group: ProcessGroup | None  # the ranks; None is this process alone
    dtype: torch.dtype | None = None  # of buffers in transit; None leaves them unchanged

    def __post_init__(self) -> None:
        if self.op not in OPS:
            choices = ", ".join(map(repr, OPS))
            raise InvalidArgumentError(f"op must be one of {choices}, got {self.op!r}")
        check_floating("reduce_dtype", self.dtype)

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return get_world_size(self.group)

    @cached_property
    def rank(self) -> int:
        """This rank's index in the group."""
        return get_rank(self.group)

    def folds(self, dtype: torch.dtype) -> bool:
        """Return whether each rank adds up its shard of a buffer of this dtype, in float32."""
        travels = dtype if self.dtype is None or not dtype.is_floating_point else self.dtype
        return self.size > 1 and sum_dtype(travels) is not travels

    def multiple(self, dtype: torch.dtype) -> int:
        """Return the factor that a buffer's length must have, so that shards are even."""
        return self.size if self.folds(dtype) else 1

    def gather(self, data: Tensor, counts: list[int]) -> Work[Any]:
        """Start gathering the ranks' shards of a flat tensor, in place."""
        work = all_gather_flat(data, counts, self.group, async_op=True)
        return work if isinstance(work, Work) else Work((), lambda: None)

    def whole(self, buffer: Tensor) -> Work[Tensor]:
        """Start reducing a flat buffer, in place; the work returns it."""
        wire = self._wire(buffer)
        work = all_reduce_flat(wire, self.op, group=self.group)
        return work if wire is buffer else Work((work,), lambda: buffer.copy_(wire))

    def shard(self, buffer: Tensor, counts: list[int]) -> Work[Tensor]:
        """Start reduce-scattering a flat buffer; the work returns this rank's shard."""
        return reduce_scatter_flat(self._wire(buffer), counts, self.op, self.group)

    def _wire(self, buffer: Tensor) -> Tensor:
        dtype = self.dtype if buffer.dtype.is_floating_point else None
        return buffer if dtype is None else buffer.to(dtype)


def check_floating(name: str, dtype: object) -> None:
    """Refuse anything but a floating dtype or None."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidArgumentError(f"{name} must be a floating-point dtype or None, got {dtype!r}")


class Slot:
    """Keeps the synchronised sum in `parameter.grad` separate from this rank's own gradients.

    The states are drawn in the package's docstring. This rank's own gradient lives in a bucket's
    buffer. If that has the parameter's dtype, `parameter.grad` is a view of it, into which autograd
    adds. Otherwise each backward's gradient is added to the buffer, and `parameter.grad` keeps it
    only to show whether it was zeroed. `index` is the position among the slots.
    """

    def __init__(self, name: str, index: int, parameter: nn.Parameter) -> None:
        self.name = name
        self.index = index
        self.parameter = parameter
        self.local = False
        self.dtype = parameter.dtype  # when it was wrapped
        self._held: Tensor | None = None
        self._view: Tensor | None = None
        self._shown: Tensor | None = None
        self._version = 0
        self._seen: int | None = None  # the parameter's version when its gradient came

    def open(self) -> bool:
        """Follow changes of this rank's own gradient since `close`, when a backward begins.

        A `zero_grad` between an unsynchronised backward and the next is meant for the held sum too,
        but reaches only the visible gradient. Return whether a gradient was dropped or zeroed.
        """
        grad = self.parameter.grad
        if grad is None:
            dropped, self.local, self._held = self.local, False, None
            return dropped
        # Every write raises the version, so values are read only after one.
        changed = grad is not self._shown or grad._version != self._version
        return self.local and changed and self._apply_change(grad)

    def _apply_change(self, grad: Tensor) -> bool:
        """Apply a change of the visible gradient; return whether it was zeroed."""
        zeroed = not grad.any()
        if zeroed and self._held is not None:
            self._held.zero_()  # the same as on ranks that have not used the parameter since
            self.local = False
            self.give(None)
            return True
        replaced = zeroed or grad is not self._shown
        if replaced and self._view is not None and grad is not self._view:
            self._view.copy_(grad)
        return zeroed

    def close(self) -> None:
        """Tidy the gradient when a backward without synchronisation ends."""
        self._seen = None
        grad = self.parameter.grad
        if self.local and grad is not None:
            self._shown, self._version = grad, grad._version
        elif self._held is not None:  # no gradient came, as in torch.autograd.grad
            self.give(None)

    def before_accumulation(self) -> None:
        """Hold a synchronised gradient back, so that autograd starts a new one."""
        self._seen = self.parameter._version
        if not self.local:
            # The sum is the same on every rank: if it travelled, each rank would count it.
            if self.parameter.grad is not None:
                self._held, self.parameter.grad = self.parameter.grad, None
        elif self.parameter.grad is not self._view:
            # The buffer has another dtype and already holds these values. With None autograd
            # passes the new gradient alone.
            self.parameter.grad = None

    def after_accumulation(self, place: Callable[[Slot], Tensor]) -> bool:
        """Note that the gradient is this rank's own; `place` returns the slot's memory for it."""
        grad = self.parameter.grad
        if grad is None:
            return False
        if grad.layout is not torch.strided:
            raise StateError(
                f"the gradient of {self.name} has layout {grad.layout}, and only dense gradients "
                "are synchronised: build its module with sparse=False"
            )
        # If it is the view, autograd has already added to the buffer in place.
        if grad is not self._view or not self.local:
            self._store(grad, place)
        return True

    def require_unchanged(self, *, ends: bool = False) -> None:
        """Refuse a parameter that was updated after its gradient came, before backward `ends`."""
        seen, self._seen = self._seen, None if ends else self._seen
        if seen not in (None, self.parameter._version):
            raise StateError(
                f"{describe_rank()}: {self.name} was updated within backward (by an optimizer in a "
                "hook on its gradient, perhaps) by this rank's own gradient, before it is summed "
                "over ranks: call optimizer.step() after backward"
            )

    def take(self, place: Tensor) -> bool:
        """Move this rank's own gradient to `place` in the buffer, and return whether it has one."""
        local, grad, self.parameter.grad = self.local, self.parameter.grad, None
        if not local:
            place.zero_()
            if grad is not None:
                self._held = grad
        elif grad is not None and grad is not self._view and grad.dtype == place.dtype:
            place.copy_(grad)  # a hook has replaced it
        self.local, self._view, self._shown = False, None, None
        return local

    @property
    def has_synchronised(self) -> bool:
        """True if there is a gradient from an earlier synchronisation."""
        return self._held is not None or (not self.local and self.parameter.grad is not None)

    def give(self, reduced: Tensor | None) -> None:
        """Set the gradient to the held one, plus the sum over ranks if any rank has one."""
        held, self._held = self._held, None
        if reduced is not None:
            held = self._conform(reduced if held is None else reduced.add_(held))
        self.parameter.grad = held

    def set_placeholder(self, gradient: Tensor) -> None:
        """Set a placeholder for a gradient in shards, which include the held one."""
        self._held, self.parameter.grad = None, gradient

    def clear(self) -> None:
        """Forget everything; the gradient becomes None."""
        self.local, self._seen = False, None
        self._held = self._view = self._shown = None
        self.parameter.grad = None

    def _store(self, grad: Tensor, place: Callable[[Slot], Tensor]) -> None:
        """Move a gradient that autograd made into the buffer."""
        if self.parameter.dtype != self.dtype:
            raise StateError(
                f"{self.name} was {self.dtype} when it was wrapped, and is "
                f"{self.parameter.dtype} now: convert the module first, then wrap it"
            )
        if self.local and self._view is not None:
            self._view.add_(grad)
        else:
            self._view, self.local = place(self).copy_(grad), True
        if self._view.dtype == grad.dtype:
            self.parameter.grad = self._view

    def _conform(self, grad: Tensor) -> Tensor:
        """Return `grad` in the parameter's dtype and strides, copied only if they differ."""
        parameter = self.parameter
        if grad.dtype == parameter.dtype and parameter.is_contiguous():
            return grad
        return torch.empty_like(parameter, requires_grad=False).copy_(grad)


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
        self.reset()

    def _begin(self) -> None:
        """Prepare for another backward; keep gradients that have already arrived."""
        self.launched = False
        self._missing = set(self._places)
        self._used = [False] * len(self.slots)  # whether this rank has a gradient
        self._finite: Tensor | None = None  # bool, one for each slot
        self._work: Work[Tensor] | None = None

    def convert(self, dtype: torch.dtype) -> None:
        """Hold gradients in another dtype from now on, and follow parameters' new dtypes."""
        self.dtype = dtype
        self._buffer = self._spare = None
        for slot in self.slots:
            slot.dtype = slot.parameter.dtype

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
        return self._view(self._own_buffer(), slot)

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
        self._used = [slot.take(self.place(slot)) for slot in self.slots]
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

    def flags(self) -> Iterator[tuple[Slot, int]]:
        """Yield the parameters with this rank's flags."""
        finite = [True] * len(self.slots) if self._finite is None else self._finite.tolist()
        for slot, used, fine in zip(self.slots, self._used, finite, strict=True):
            flag = (USED if used else UNUSED) if fine else NONFINITE
            yield slot, LATE if slot.local else flag  # late: a gradient came after the launch

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

    def _reuse(self) -> None:
        """Keep the buffer of the finished reduction for the next backward."""
        if self._sent is not None and self.keeps_buffer:
            self._spare = self._sent
        self._sent = None

    def _start(self, reduction: Reduction, buffer: Tensor) -> Work[Tensor]:
        return reduction.whole(buffer)

    def _give(self, reduced: Tensor, flags: Sequence[int]) -> None:
        for slot, view in self._views(reduced):
            slot.give(view if flags[slot.index] != UNUSED else None)

    def _views(self, buffer: Tensor) -> Iterator[tuple[Slot, Tensor]]:
        for slot in self.slots:
            yield slot, self._view(buffer, slot)

    def _view(self, buffer: Tensor, slot: Slot) -> Tensor:
        start, parameter = self._places[slot.index], slot.parameter
        return buffer[start : start + parameter.numel()].view(parameter.shape)

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

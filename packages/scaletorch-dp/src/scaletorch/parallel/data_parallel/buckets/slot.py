"""The gradient of one parameter: the synchronised sum, and separately this rank's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ....dist.errors import StateError
from ...pg_manager import describe_rank

Place = Callable[["Slot"], Tensor]


class Slot:
    """Keeps the synchronised sum in `parameter.grad` separate from this rank's own gradients.

    The states are drawn in the package's docstring. This rank's own gradient lives in a bucket's
    buffer. If that has the parameter's dtype, `parameter.grad` is a view of it, into which autograd
    adds. Otherwise each backward's gradient is added to the buffer, and `parameter.grad` keeps it
    only to show whether it was zeroed. `index` is the position among the slots.
    """

    __slots__ = (
        "_dtype", "_held", "_seen", "_shown", "_version", "_view", "buffer_dtype", "index", "local",
        "name", "parameter",
    )  # fmt: skip

    def __init__(self, name: str, index: int, parameter: nn.Parameter) -> None:
        self.name = name
        self.index = index
        self.parameter = parameter
        self.local = False
        self.buffer_dtype = parameter.dtype  # its bucket's
        self._dtype = parameter.dtype
        self._held: Tensor | None = None
        self._view: Tensor | None = None
        self._shown: Tensor | None = None
        self._version = 0
        self._seen: int | None = None  # the parameter's version when its gradient came

    def convert(self, buffer_dtype: torch.dtype) -> None:
        """Follow a change of the parameter's dtype and of its bucket's."""
        self._dtype, self.buffer_dtype = self.parameter.dtype, buffer_dtype

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

    def after_accumulation(self, place: Place) -> bool:
        """Note that the gradient is this rank's own; `place` returns the slot's memory for it."""
        grad = self.parameter.grad
        if grad is None:
            return False
        if grad.layout is not torch.strided:
            message = (
                f"the gradient of {self.name} has layout {grad.layout}, and only dense gradients "
                "are synchronised: build its module with sparse=False"
            )
            raise StateError(message)
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

    def _store(self, grad: Tensor, place: Place) -> None:
        """Move a gradient that autograd made into the buffer."""
        if self.parameter.dtype != self._dtype:
            raise StateError(
                f"{self.name} was {self._dtype} when it was wrapped, and is "
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

"""One parameter's gradient, parted into what is synchronised and what is this rank's alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...dist.errors import StateError


class Slot:
    """Keeps the synchronised part of ``parameter.grad`` apart from what this rank adds to it.

    Between backward calls the gradient is either synchronised (``local`` is False and nothing is
    held) or this rank's own since the last synchronisation (``local`` is True): a synchronised
    gradient that was there before is then held back, and added again by `give`.

    Args:
        name: The parameter's name in its module.
        index: Its position among the slots.
        parameter: The parameter; it must require grad.
    """

    __slots__ = ("_held", "_version", "index", "local", "name", "parameter")

    def __init__(self, name: str, index: int, parameter: nn.Parameter) -> None:
        self.name = name
        self.index = index
        self.parameter = parameter
        self.local = False
        self._held: Tensor | None = None
        self._version = 0

    def open(self) -> None:
        """Look, when a backward begins, at what became of this rank's own gradient since `close`.

        A zero_grad between an unsynchronised backward and the next means the held part too, and
        reaches only the visible one. The version tells whether the values need a look.
        """
        grad = self.parameter.grad
        if grad is None:
            self.local, self._held = False, None
        elif self._held is not None and grad._version != self._version and not grad.any():
            self._held = None

    def close(self) -> None:
        """Put the gradient in order when a backward that is not synchronised ends."""
        grad = self.parameter.grad
        if self.local and grad is not None:
            self._version = grad._version
        elif self._held is not None:  # no gradient came, as in torch.autograd.grad
            self.give(None)

    def before_accumulation(self) -> None:
        """Hold a synchronised gradient back, so that autograd starts a new one."""
        if not self.local and self.parameter.grad is not None:
            self._held, self.parameter.grad = self.parameter.grad, None

    def after_accumulation(self) -> bool:
        """Note that the gradient is now this rank's own; False where autograd gave none.

        Raises:
            StateError: The gradient is sparse.
        """
        grad = self.parameter.grad
        if grad is None:
            return False
        if grad.layout is not torch.strided:
            message = (
                f"the gradient of {self.name} has layout {grad.layout}, and only dense gradients "
                "are synchronised: build its module with sparse=False"
            )
            raise StateError(message)
        self.local = True
        return True

    def take(self) -> Tensor | None:
        """Move this rank's own gradient out, leaving None; None where there is none."""
        grad, self.parameter.grad = self.parameter.grad, None
        if self.local:
            self.local = False
            return grad
        if grad is not None:
            self._held = grad
        return None

    def give(self, reduced: Tensor | None) -> None:
        """Set the gradient to the held one plus ``reduced``, which may be changed and kept.

        A gradient that arrived since `take` stays this rank's own, with the sum held.
        """
        held, self._held = self._held, None
        if reduced is None:
            total = held
        else:
            total = self._conform(reduced if held is None else reduced.add_(held))
        if self.local:
            self._held = total
        else:
            self.parameter.grad = total

    def clear(self) -> None:
        """Forget everything; the gradient is None."""
        self.local = False
        self._held = None
        self.parameter.grad = None

    def _conform(self, grad: Tensor) -> Tensor:
        """Return ``grad`` in the parameter's dtype and strides, copied only where they differ."""
        parameter = self.parameter
        if grad.dtype == parameter.dtype and parameter.is_contiguous():
            return grad
        return torch.empty_like(parameter, requires_grad=False).copy_(grad)

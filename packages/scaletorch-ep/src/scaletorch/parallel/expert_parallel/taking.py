"""What experts take of their rows and of their stacks, one expert at a time, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from .functions import apply


def call_taking(
    experts: Callable[..., Any], rows: Tensor, given: tuple[Tensor, ...], stacks: Sequence[Tensor]
) -> Any:
    """Call experts, with gradients that cost less of what they take of one stack or of the rows.

    The gradient of `stack[expert]` in PyTorch is as large as the stack, zeros but for that expert,
    and all of them are added up: for E experts it writes E times all weights. Here it is written
    once. The gradient of `rows[index]` is added to in the way that is slow in bfloat16. Values are
    the same. All else that experts do is as ever, and so is everything if it is compiled.

    Args:
        experts: Called as `experts(rows, *given)`.
        rows: Hidden states [P, H].
        given: Indices and weights, [P, 1].
        stacks: Parameters of all experts, one along dim 0 for each.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return experts(rows, *given)
    with _Taking(rows, stacks):
        return experts(rows, *given)


class _Taking(TorchFunctionMode):
    """While it is on, indexing of the rows and of the stacks has gradients of its own."""

    def __init__(self, rows: Tensor, stacks: Sequence[Tensor]) -> None:
        super().__init__()
        self.rows = rows
        self.stacks: list[tuple[Tensor, list[Tensor]]] = [(each, []) for each in stacks]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what was asked for."""
        part = None
        if func is Tensor.__getitem__ and not torch.compiler.is_compiling():
            part = self._part(*args)
        return func(*args, **(kwargs or {})) if part is None else part

    def _part(self, of: Tensor, index: Any) -> Tensor | None:
        """Return what is taken, or None if it is something else."""
        dim = index.dim() if isinstance(index, Tensor) and index.dtype == torch.int64 else None
        if of is self.rows and dim == 1:
            part: Tensor = apply(_Rows, of, index)
            return part
        if dim == 0 or type(index) is int:
            for stack, parts in self.stacks:
                if of is stack:
                    parts += [] if parts else stack.unbind()
                    return parts[int(index)]
        return None


class _Rows(Function):
    """Rows of an index; backward adds theirs by a quicker kernel than PyTorch's own does."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        """Return `rows[index]`."""
        ctx.rows = len(rows)
        index = torch.where(index < 0, index + len(rows), index)
        ctx.save_for_backward(index)
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of all rows."""
        (index,) = ctx.saved_tensors
        total = grads[0].new_zeros((ctx.rows, *grads[0].shape[1:]))
        return total.index_add_(0, index, grads[0]), None

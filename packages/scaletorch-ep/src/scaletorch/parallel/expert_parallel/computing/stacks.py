"""One stack of experts' weights taken apart: gradients of all its parts are written in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..exchange.functions import apply, once_differentiable

# Products of rows [T, I] and a part, and whether it is [O, I], for `rows @ part.T`, or [I, O].
PRODUCTS: dict[Any, bool] = {
    torch.nn.functional.linear: True,
    torch.matmul: False,
    torch.mm: False,
    Tensor.__matmul__: False,
    Tensor.matmul: False,
    Tensor.mm: False,
}


class Stack:
    """One tensor in which the parts of a stack, of one call, have their gradients.

    PyTorch's own gradients of parts are tensors of their own, which are copied into that of the
    stack: as much memory again, and a pass over all weights. Here products write into it. The graph
    holds this, so this holds no part, which would hold the graph: no collector sees such a circle.

    Args:
        whole: The stack.
    """

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole
        self.gradient: Tensor | None = None  # while a backward is under way
        self.written: set[int] = set()  # parts that have theirs in it

    def apart(self) -> tuple[Tensor, ...]:
        """Return the parts, along dim 0; once."""
        parts: tuple[Tensor, ...] = apply(_Parts, self.whole, self)
        return parts

    def place(self, number: int) -> Tensor | None:
        """Return where the gradient of a part goes; None from the second time in a backward."""
        if number in self.written:
            return None
        self.written.add(number)
        if self.gradient is None:
            self.gradient = torch.empty_like(self.whole, memory_format=torch.contiguous_format)
        return self.gradient[number]

    def gathered(self, gradients: tuple[Tensor | None, ...]) -> Tensor:
        """Return the gradient of the whole, once those of the parts are there."""
        found, self.gradient = self.gradient, None
        self.written.clear()
        if found is None:
            found = torch.empty_like(self.whole, memory_format=torch.contiguous_format)
        for place, gradient in zip(found.unbind(), gradients, strict=True):
            if gradient is None:
                place.zero_()
            elif gradient.data_ptr() != place.data_ptr():
                place.copy_(gradient)
        return found


class _Parts(Function):
    """`whole.unbind()`, of which backward copies no gradient that is in its place already."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, stack: Stack) -> tuple[Tensor, ...]:
        """Return the parts."""
        ctx.set_materialize_grads(False)
        ctx.stack = stack
        return whole.unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Return the gradient of the whole."""
        return ctx.stack.gathered(grads), None


def product(
    func: Any, args: tuple[Any, ...], places: dict[int, tuple[Stack, int]]
) -> Tensor | None:
    """Return a product whose backward writes a part's gradient in place; None if it is none.

    Args:
        func: What is called.
        args: Its arguments, of which there are no others.
        places: Number of a tensor (`id`) -> the stack that it is a part of, and which.
    """
    place = places.get(id(args[1])) if len(args) == 2 else None
    if place is None:
        return None
    rows, part = args
    plain = type(rows) is Tensor and rows.dim() == part.dim() == 2 and rows.dtype == part.dtype
    if not plain or torch.is_autocast_enabled(rows.device.type):
        return None
    result: Tensor = apply(_Product, rows, part, PRODUCTS[func], *place)
    return result


class _Product(Function):
    """Rows times a part; the bits of PyTorch's own, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, part: Tensor, transposed: bool, stack: Stack, number: int
    ) -> Tensor:
        """Return [T, O]."""
        ctx.save_for_backward(rows, part)
        ctx.transposed, ctx.stack, ctx.number = transposed, stack, number
        return rows.mm(part.t() if transposed else part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients of the rows and of the part."""
        rows, part = ctx.saved_tensors
        (grad,), of_rows, of_part = grads, None, None
        if ctx.needs_input_grad[0]:
            of_rows = grad.mm(part if ctx.transposed else part.t())
        if ctx.needs_input_grad[1]:
            left, right = (grad, rows) if ctx.transposed else (rows, grad)
            place = ctx.stack.place(ctx.number)
            of_part = left.t().mm(right) if place is None else torch.mm(left.t(), right, out=place)
        return of_rows, of_part, None, None, None

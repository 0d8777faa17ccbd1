"""Linear layers whose backward overlaps communication and computation.

The gradient of a shared input is summed over the ranks as soon as all layers have added theirs. So
`Multiply` computes only input gradients; `Enter` computes weight gradients during that sum.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from ....dist import all_reduce, get_rank, reduce_scatter
from ...placement import Invariant, Partial, Replicate, Shard, convert

Operands = tuple[Tensor, Tensor | None]  # weight [out, in] and bias [out]
# For each call of a layer: the gradient of its output [..., out] and its input [..., in].
Products = Sequence[tuple[Tensor, Tensor]]

DIM = -2  # the dim of tokens in [..., L, H]


class Entrance:
    """The shared input of several layers, with their weights and biases.

    Args:
        x: [..., in]; replicated, or with `sizes` this rank's sequence shard.
        operands: Weight [out, in] and bias [out] of each layer.
        group: Ranks over which the gradient of `x` is summed.
        sizes: Number of tokens on each rank if `x` is a sequence shard, else None.

    Attributes:
        x: The full input of the layers.
    """

    __slots__ = ("_operands", "_waiting", "x")

    def __init__(
        self,
        x: Tensor,
        operands: Mapping[Hashable, Operands],
        group: ProcessGroup | None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        enter: Any = Enter
        self._operands = operands
        self._waiting: dict[Hashable, list[tuple[Tensor, Tensor]]] = {key: [] for key in operands}
        flat = [each for pair in operands.values() for each in pair]
        self.x: Tensor = enter.apply(x, list(self._waiting.values()), group, sizes, *flat)

    def linear(self, key: Hashable) -> Tensor:
        """Return a layer's output [..., out] for the full input."""
        multiply: Any = Multiply
        out: Tensor = multiply.apply(self.x, *self._operands[key], self._waiting[key])
        return out


class Enter(torch.autograd.Function):
    """Identity or all-gather; backward does the sum or reduce-scatter, and weight gradients.

    Weights are inputs only so that their gradients can be returned here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        waiting: list[list[tuple[Tensor, Tensor]]],
        group: ProcessGroup | None,
        sizes: Sequence[int] | None,
        *operands: Tensor | None,
    ) -> Tensor:
        """Return the full `x`."""
        ctx.waiting, ctx.group, ctx.sizes = waiting, group, sizes
        if sizes is None:
            return x.view_as(x)
        return convert(x, Shard(DIM, tuple(sizes)), Replicate(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Sum the gradient of `x`, and compute the weight gradients meanwhile."""
        (grad,) = grads
        x_needed, _, _, _, *needed = ctx.needs_input_grad
        if torch.is_grad_enabled():  # with create_graph `Multiply` returned the weight gradients
            wanted = Invariant() if ctx.sizes is None else Shard(DIM, tuple(ctx.sizes))
            summed = convert(grad, Partial(), wanted, ctx.group) if x_needed else None
            return summed, None, None, None, *(None for _ in needed)
        # All `Multiply` nodes have run, since `grad` is the sum of theirs: start its sum over the
        # ranks now and compute the weight gradients meanwhile.
        arrive = send(grad, ctx.group, ctx.sizes) if x_needed else None
        found: list[Tensor | None] = []
        for products in ctx.waiting:
            for compute in (weight_grad, bias_grad):
                found.append(compute(products) if needed[len(found)] else None)
            products.clear()  # for a second backward of a retained graph
        return None if arrive is None else arrive(), None, None, None, *found


class Multiply(torch.autograd.Function):
    """A linear layer that leaves the gradients of its weight and bias to `Enter`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        waiting: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Return the output of the linear layer."""
        ctx.waiting = waiting
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of `x`; keep the factors of the weight gradient for `Enter`."""
        (grad,) = grads
        x, weight = ctx.saved_tensors
        if not x.dtype == weight.dtype == grad.dtype:  # autocast used the output's dtype
            x, weight = x.to(grad.dtype), weight.to(grad.dtype)
        weight_needed, bias_needed = ctx.needs_input_grad[1:3]
        if not torch.is_grad_enabled():
            if weight_needed or bias_needed:
                ctx.waiting.append((grad, x))
            return grad.matmul(weight), None, None, None
        # With create_graph these gradients are differentiated again, so they need a graph here.
        products: Products = [(grad, x)]
        return (
            grad.matmul(weight),
            weight_grad(products) if weight_needed else None,
            bias_grad(products) if bias_needed else None,
            None,
        )


def weight_grad(products: Products) -> Tensor | None:
    """Return the gradient of the weight [out, in] over all calls, or None without calls."""
    total: Tensor | None = None
    for grad, x in products:
        rows, columns = _rows(grad).t(), _rows(x)
        total = rows.mm(columns) if total is None else total.addmm(rows, columns)
    return total


def bias_grad(products: Products) -> Tensor | None:
    """Return the gradient of the bias [out] over all calls, or None without calls."""
    total: Tensor | None = None
    for grad, _ in products:
        own = _rows(grad).sum(0)
        total = own if total is None else total + own
    return total


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def send(
    grad: Tensor, group: ProcessGroup | None, sizes: Sequence[int] | None
) -> Callable[[], Tensor]:
    """Start the sum of the input's gradient; return a function that waits for the result."""
    if sizes is None:
        # In place: only `Multiply` nodes made it, so nothing else uses it.
        work = all_reduce(grad, group=group, async_op=True)
        return lambda: work.wait() or grad
    parts = grad.split(list(sizes), DIM)
    share = torch.empty_like(parts[get_rank(group)], memory_format=torch.contiguous_format)
    work = reduce_scatter(share, parts, group=group, async_op=True)
    return lambda: work.wait() or share

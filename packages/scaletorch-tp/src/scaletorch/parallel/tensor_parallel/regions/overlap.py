"""Linear layers whose backward communicates and computes at once.

The gradient of what layers take in is a sum over the ranks, and can leave as soon as every layer
has given its part. So the products give only that part; the gradients of weights are computed
where the input entered, while the sum travels.
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
# Of each call of a layer: the gradient of its output [..., out], and its input [..., in].
Products = Sequence[tuple[Tensor, Tensor]]

DIM = -2  # of tokens in [..., L, H]


class Entrance:
    """An input of several layers, with their weights and biases.

    Args:
        x: [..., in]; what every rank has, or with `sizes` this rank's share of a sequence.
        operands: Weight [out, in] and bias [out] of each layer.
        group: Ranks over which the gradient of `x` is summed.
        sizes: How many tokens each rank has, if `x` is a shard of a sequence.

    Attributes:
        x: The whole, which the layers multiply.
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
        """Return the whole input times a layer's weight, plus its bias: [..., out]."""
        multiply: Any = Multiply
        out: Tensor = multiply.apply(self.x, *self._operands[key], self._waiting[key])
        return out


class Enter(torch.autograd.Function):
    """Identity or all-gather forward; sum or reduce-scatter backward, and the weights' gradients.

    Weights are inputs only so that autograd takes their gradients from here.
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
        """Return the whole `x`."""
        ctx.waiting, ctx.group, ctx.sizes = waiting, group, sizes
        if sizes is None:
            return x.view_as(x)
        return convert(x, Shard(DIM, tuple(sizes)), Replicate(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Sum the gradient of `x`, and compute those of the weights meanwhile."""
        (grad,) = grads
        x_needed, _, _, _, *needed = ctx.needs_input_grad
        if torch.is_grad_enabled():  # with create_graph the products gave their weights' gradients
            wanted = Invariant() if ctx.sizes is None else Shard(DIM, tuple(ctx.sizes))
            summed = convert(grad, Partial(), wanted, ctx.group) if x_needed else None
            return summed, None, None, None, *(None for _ in needed)
        # All products have run, since each gave its part of `grad`: the sum can leave now, and the
        # weights' gradients are computed while it travels.
        arrive = send(grad, ctx.group, ctx.sizes) if x_needed else None
        found: list[Tensor | None] = []
        for products in ctx.waiting:
            for compute in (weight_grad, bias_grad):
                found.append(compute(products) if needed[len(found)] else None)
            products.clear()  # a second backward of a retained graph begins anew
        return None if arrive is None else arrive(), None, None, None, *found


class Multiply(torch.autograd.Function):
    """A linear layer that leaves the gradients of its weight and bias to the entrance."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        waiting: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Return `x` times the weight, plus the bias."""
        ctx.waiting = waiting
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Hand the products on to the entrance."""
        (grad,) = grads
        x, weight = ctx.saved_tensors
        if not x.dtype == weight.dtype == grad.dtype:  # autocast computed in the output's dtype
            x, weight = x.to(grad.dtype), weight.to(grad.dtype)
        weight_needed, bias_needed = ctx.needs_input_grad[1:3]
        if not torch.is_grad_enabled():
            if weight_needed or bias_needed:
                ctx.waiting.append((grad, x))
            return grad.matmul(weight), None, None, None
        # With create_graph these are differentiated again: they belong where their graph is.
        products: Products = [(grad, x)]
        return (
            grad.matmul(weight),
            weight_grad(products) if weight_needed else None,
            bias_grad(products) if bias_needed else None,
            None,
        )


def weight_grad(products: Products) -> Tensor | None:
    """Return the sum of the products' gradients of the weight [out, in], None without any."""
    total: Tensor | None = None
    for grad, x in products:
        rows, columns = _rows(grad).t(), _rows(x)
        total = rows.mm(columns) if total is None else total.addmm(rows, columns)
    return total


def bias_grad(products: Products) -> Tensor | None:
    """Return the sum of the products' gradients of the bias [out], None without any."""
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
    """Send the gradient of the whole input; return what waits for this rank's sum."""
    if sizes is None:
        # In place: it comes from products alone, and nobody else has it.
        work = all_reduce(grad, group=group, async_op=True)
        return lambda: work.wait() or grad
    parts = grad.split(list(sizes), DIM)
    share = torch.empty_like(parts[get_rank(group)], memory_format=torch.contiguous_format)
    work = reduce_scatter(share, parts, group=group, async_op=True)
    return lambda: work.wait() or share

"""Parallel regions: modules whose column-parallel layers share one input.

Autograd first adds the gradients of these layers (query, key and value, or gate and up), so that
one sum over the ranks is enough. `Enter` starts it and computes weight gradients meanwhile.
`SumGradient` sums gradients over the ranks that hold the same shard: key/value heads if there are
fewer than ranks, and the key that all heads share in multi-head latent attention (DeepSeek-V2).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional

from ....dist import all_reduce, get_rank, reduce_scatter
from ....dist.building import sum_dtype
from ....dist.functional import Reduce, ReduceScatter, spmd_local, spmd_type
from ...pg_manager.building import around_compiled, uncompiled
from ...placement import Cut, Invariant, Partial, Placement, Replicate, Shard, convert
from .sequence_shares import DIM, SequenceShares, convert_hidden, shapes_explained
from .surround import Surrounded, own_class

Operands = tuple[Tensor, Tensor | None]  # weight [out, in] and bias [out]
# For each call of a layer: the gradient of its output [..., out] and its input [..., in].
Products = list[tuple[Tensor, Tensor]]


class Entrance:
    """The full input `x` [..., in] of several layers, with their weights and biases."""

    __slots__ = ("_operands", "_waiting", "x")

    def __init__(
        self,
        x: Tensor,
        operands: Mapping[Hashable, Operands],
        group: ProcessGroup | None,
        sizes: Sequence[int] | None = None,  # of all ranks' sequence shards; None: `x` is full
    ) -> None:
        enter: Any = Enter
        self._operands = operands
        self._waiting: dict[Hashable, Products] = {key: [] for key in operands}
        flat = [tensor for pair in operands.values() for tensor in pair]
        self.x: Tensor = enter.apply(x, list(self._waiting.values()), group, sizes, *flat)

    def linear(self, key: Hashable) -> Tensor:
        """Return a layer's output [..., out] for the full input."""
        multiply: Any = Multiply
        out: Tensor = multiply.apply(self.x, *self._operands[key], self._waiting[key])
        return out


class Enter(torch.autograd.Function):
    """Identity or all-gather; backward does the sum or reduce-scatter, and weight gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        waiting: list[Products],
        group: ProcessGroup | None,
        sizes: Sequence[int] | None,
        *operands: Tensor | None,
    ) -> Tensor:
        """Return the full `x`."""
        ctx.waiting, ctx.group, ctx.sizes = waiting, group, sizes
        if sizes is None:
            ctx.way = Reduce, group
            return x.view_as(x)
        ctx.way = ReduceScatter, DIM, group, sizes
        return convert(x, Shard(DIM, tuple(sizes)), Replicate(), group)

    @staticmethod
    def spmd_typecheck(
        *, x: Tensor, group: ProcessGroup | None, sizes: Sequence[int] | None, operands: Any
    ) -> Any:
        """Return the type of the full `x`; the operands are for backward alone."""
        spmd_local((), *operands)
        if sizes is None:
            return spmd_type(x, group, "convert", "I", "R")
        return spmd_type(x, group, "all_gather", DIM, "R")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Sum the gradient of `x`, and compute the weight gradients meanwhile."""
        (grad,) = grads
        x_needed, _, _, _, *needed = ctx.needs_input_grad
        # All `Multiply` nodes have run, since `grad` is the sum of theirs: start its sum over the
        # ranks now and compute the weight gradients meanwhile.
        arrive = send(grad, ctx.group, ctx.sizes) if x_needed else None
        found: list[Tensor | None] = []
        for products in ctx.waiting:
            for compute in (weight_grad, bias_grad):
                found.append(compute(products) if products and needed[len(found)] else None)
            products.clear()  # for a second backward of a retained graph
        return None if arrive is None else arrive(), None, None, None, *found


class Multiply(torch.autograd.Function):
    """A linear layer that leaves the gradients of its weight and bias to `Enter`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, waiting: Products
    ) -> Tensor:
        """Return the output of the linear layer."""
        ctx.waiting = waiting
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    def spmd_typecheck(output: Tensor, *, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Give the output the type of a product of shards."""
        spmd_local(output, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of `x`; keep the factors of the weight gradient for `Enter`."""
        (grad,) = grads
        x, weight = ctx.saved_tensors
        if not x.dtype == weight.dtype == grad.dtype:  # autocast used the output's dtype
            x, weight = x.to(grad.dtype), weight.to(grad.dtype)
        if any(ctx.needs_input_grad[1:3]):
            ctx.waiting.append((grad, x))
        return grad.matmul(weight), None, None, None


def weight_grad(products: Products) -> Tensor:
    """Return the gradient of the weight [out, in] over all calls."""
    return reduce(torch.add, (_rows(grad).t().mm(_rows(x)) for grad, x in products))


def bias_grad(products: Products) -> Tensor:
    """Return the gradient of the bias [out] over all calls."""
    return reduce(torch.add, (_rows(grad).sum(0) for grad, _ in products))


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def send(
    grad: Tensor, group: ProcessGroup | None, sizes: Sequence[int] | None
) -> Callable[[], Tensor]:
    """Start the sum of the input's gradient; return a function that waits for the result."""
    if torch.is_grad_enabled():  # with create_graph the sum is differentiated again
        wanted = Invariant() if sizes is None else Shard(DIM, tuple(sizes))
        summed = convert(grad, Partial(), wanted, group)
        return lambda: summed
    if sizes is None:
        # In place: no other code uses a gradient that `Multiply` nodes returned.
        work = all_reduce(grad, group=group, async_op=True)
        return lambda: work.wait() or grad
    shards = grad.split(list(sizes), DIM)
    share = torch.empty_like(shards[get_rank(group)], memory_format=torch.contiguous_format)
    work = reduce_scatter(share, shards, group=group, async_op=True)
    return lambda: work.wait() or share


T = TypeVar("T")

ADAPTED = "base_layer"  # an adapter's attribute for the layer that it wraps


@dataclass(slots=True)
class _Running:
    """A region whose forward is running."""

    overlapping: Sequence[Any]  # layers that compute weight gradients during the sum
    entries: dict[Any, tuple[Tensor, Any]] = field(default_factory=dict)  # inputs that entered
    gathered: Entrance | None = None  # of the sequence, under sequence parallelism

    def once(self, x: Tensor, call: Callable[..., T], *args: Any) -> T:
        """Return `call(x, *args)`, computed once for all layers with the input `x`."""
        # An input changed in place, or used again under no_grad, counts as a new one. The entry
        # keeps `x` alive, so that no other tensor can get its id while the region runs.
        key = call, id(x), x._version, torch.is_grad_enabled()
        if key not in self.entries:
            self.entries[key] = x, call(x, *args)
        entered: T = self.entries[key][1]
        return entered


# The running region; None outside regions.
_running: ContextVar[_Running | None] = ContextVar("_running", default=None)


@uncompiled
def enter(
    x: Tensor,
    group: ProcessGroup | None,
    sequence: SequenceShares | None = None,
    arrives: Placement | None = None,
) -> Tensor:
    """Return the full input for this rank's shards; backward sums its gradient over the ranks."""
    running = _running.get()
    if arrives is not None:
        return convert(x, arrives, Replicate(), group)
    if sequence is not None:  # a region gathers before its forward, and sums after its backward
        return sequence.enter(x) if running is None else x
    placements = Invariant(), Replicate(), group
    return running.once(x, convert, *placements) if running else convert(x, *placements)


@uncompiled
def overlapped_linear(layer: Any, x: Tensor) -> Tensor | None:
    """Return a column-parallel layer's output [..., out / tp] if backward can overlap, or None."""
    running, sequence = _running.get(), layer.sequence
    if not _needs_grad(x) or (sequence is not None and sequence.in_rows(x, sequence.local)):
        return None
    if running is None:
        return _entrance(x, [layer]).linear(layer)
    if layer not in running.overlapping:  # a layer of another module, called from this region
        return None
    if sequence is None:
        return running.once(x, _entrance, running.overlapping).linear(layer)
    # The region gathered one tensor; a layer with another input cannot overlap.
    gathered = running.gathered
    return gathered.linear(layer) if gathered is not None and gathered.x is x else None


class Region(Surrounded):
    """A module with column-parallel children, whose common input enters once.

    With sequence parallelism it gathers its hidden states, as modules read sizes from their input.
    """

    _sequence: SequenceShares | None = None

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        children = [layer_of(child) for child in self._modules.values()]
        overlapping = [child for child in children if getattr(child, "async_all_reduce", False)]
        running = _Running(overlapping)
        token = _running.set(running)
        try:
            if self._sequence is None:
                return super().forward(*args, **kwargs)
            columns = [child for child in children if hasattr(child, "gather_output")]
            # Widths distinguish hidden states from masks and positions.
            widths = {int(getattr(child, "in_features", 0)) for child in columns}
            gather = partial(_gather, running, self._sequence)
            args, kwargs, _ = convert_hidden(
                self, self._sequence, gather, args, kwargs, widths=widths
            )
            with shapes_explained(own_class(self).__name__, self._sequence):
                return super().forward(*args, **kwargs)
        finally:
            _running.reset(token)


def summed_outside(model: nn.Module) -> Iterator[str]:
    """Yield the names of layers whose region gathers the input and sums its gradient."""
    for name, module in model.named_modules():
        if isinstance(module, Region) and module._sequence is not None:
            for child_name, child in module.named_children():
                if hasattr(layer_of(child), "gather_output"):
                    yield f"{name}.{child_name}".lstrip(".")


def layer_of(module: Any) -> Any:
    """Return a child, or the layer inside if it is an adapter, even a nested one."""
    while module is not None and ADAPTED in module._modules:
        module = module._modules[ADAPTED]
    return module


@uncompiled
def _gather(running: _Running, sequence: SequenceShares, x: Tensor) -> Tensor:
    """Return the gathered sequence; set up an `Entrance` if there are overlapping layers."""
    if not running.overlapping or not _needs_grad(x) or sequence.in_rows(x, sequence.local):
        return sequence.enter(x)
    running.gathered = _entrance(x, running.overlapping)
    return running.gathered.x


def _entrance(x: Tensor, layers: Sequence[Any]) -> Entrance:
    """Return the `Entrance` of `x` for column-parallel layers of one group."""
    first = layers[0]
    sizes = None if first.sequence is None else first.sequence.sizes(x)
    return Entrance(x, {layer: layer.operands() for layer in layers}, first.group, sizes)


def _needs_grad(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


class SumGradient(torch.autograd.Function):
    """Identity; backward sums the gradient, or a slice of it, over ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, total: Callable[[Tensor], Tensor], group: ProcessGroup | None
    ) -> Tensor:
        """Return `x`; `total` maps its gradient to the sum over ranks."""
        ctx.total, ctx.way = total, (Reduce, group)
        return x.view_as(x)

    @staticmethod
    def spmd_typecheck(output: Tensor, *, x: Tensor) -> None:
        """Give the output the type of `x`, with a gradient that is a term of a sum."""
        spmd_local(output, x, partial=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the summed gradient."""
        return ctx.total(grads[0]), None, None


@uncompiled
def sum_gradient(
    x: Tensor, total: Callable[[Tensor], Tensor], group: ProcessGroup | None
) -> Tensor:
    """Return `x` with a backward that applies `total` to its gradient."""
    function: Any = SumGradient
    result: Tensor = function.apply(x, total, group) if torch.is_grad_enabled() else x
    return result


@uncompiled
def sum_replicas(x: Tensor, cut: Cut, rank: int, group: ProcessGroup | None) -> Tensor:
    """Return `x` with a gradient that is summed over the ranks that hold the same shard."""
    return sum_gradient(x, lambda grad: sum_parts(grad, cut, rank, group), group)


def sum_parts(x: Tensor, cut: Cut, rank: int, group: ProcessGroup | None) -> Tensor:
    """Return the sum of `x` over the ranks that hold the same shard."""
    # One all-reduce of the whole group, with zeros for the shards that a rank does not hold, needs
    # no subgroups and gives replicas the same bits.
    shares = list(x.split([*map(len, cut.ranges[rank])]))
    lengths = [sum(map(len, ranges)) for ranges in cut.shared.values()]
    whole = x.new_zeros((sum(lengths), *x.shape[1:]), dtype=sum_dtype(x.dtype))
    for (place, ranges), total in zip(cut.shared.items(), whole.split(lengths), strict=True):
        held = cut.ranges[rank][place]
        slot = total.narrow(0, held.start - ranges[0].start, len(held))
        slot.copy_(shares[place])
        shares[place] = slot
    all_reduce(whole, group=group)
    return torch.cat([share.to(x.dtype) for share in shares])


class TailShared(Surrounded):
    """A replicated layer whose last output features are used by all heads (`SharedTail`)."""

    shared_features: int

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward; backward sums the gradient of the last features."""

        def total(grad: Tensor) -> Tensor:
            tail = grad[..., -self.shared_features :].contiguous()
            all_reduce(tail, group=self._tp_group)
            return torch.cat([grad[..., : -self.shared_features], tail], -1)

        return sum_gradient(super().forward(*args, **kwargs), total, self._tp_group)

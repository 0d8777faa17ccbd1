"""Differentiable collectives: the backward of each is the forward of another, on the same group.

| call | forward | backward |
| --- | --- | --- |
| `copy(x)` | identity | sum over the ranks |
| `reduce(x)` | sum over the ranks | identity |
| `all_reduce(x)` | sum over the ranks | sum over the ranks |
| `all_gather(x, dim)` | every rank's `x` joined along `dim` | reduce-scatter |
| `reduce_scatter(x, dim)` | this rank's shard of the sum over the ranks | all-gather |
| `gather(x, dim)` | every rank's `x` joined along `dim` | this rank's shard |
| `split(x, dim)` | this rank's shard of `x` along `dim` | all-gather |
| `all_to_all(x, split_dim, concat_dim)` | shard i to rank i, received ones joined | the reverse |

The backwards of `all_reduce`, `all_gather`, `reduce_scatter` and `all_to_all` are exact (adjoint)
if the loss is the sum of the ranks' losses; those of `copy`, `reduce`, `gather` and `split`, if
every rank computes the same loss. No call changes its input. With one rank nothing is sent and `x`
itself may be returned. Backward communicates, so every rank of the group must run it, in the same
order. The checker of the package `spmd_types` knows the placements that each takes and returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function

from .collectives import shards
from .errors import InvalidArgumentError
from .wire.backend import Group, process_group

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Copy",
    "Gather",
    "Reduce",
    "ReduceScatter",
    "Split",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "copy",
    "gather",
    "reduce",
    "reduce_scatter",
    "split",
    "spmd_local",
    "spmd_type",
]


def _is_alone(group: Group) -> bool:
    """Return whether the group has one rank, so that nothing is sent."""
    members = process_group(group)
    return members is None or members.size() == 1


def _call(function: Any, group: Group, x: Tensor, *args: Any) -> Tensor:
    """Check that `x` is a tensor, and apply a function; with one rank, without recording it."""
    if not isinstance(x, Tensor):
        raise InvalidArgumentError(f"expected a tensor, got {type(x).__name__}")
    alone = _is_alone(group)
    if function is Copy and (alone or not torch.is_grad_enabled()):
        return x
    result: Tensor = function._run(x, *args) if alone else function.apply(x, *args)
    return result


def _backward(function: Any, grad: Tensor, group: Group, *args: Any) -> Tensor:
    """Apply the forward of another function to a gradient.

    An identity must return the same tensor object: autograd would treat a view as its own and
    accumulate into the caller's tensor.
    """
    if _is_alone(group) or (function is Copy and not torch.is_grad_enabled()):
        return grad
    result: Tensor = function.apply(grad, *args)
    return result


def spmd_type(x: Tensor, group: Group, rule: str, src: str | int, dst: str | int) -> Any:
    """Return the type of a collective's result, for the checker of `spmd_types`.

    `rule` names a function in `spmd_types.rules`; `src` and `dst` are placements of `x` and of the
    result: "R", "I", "V", "P" or the dim of a shard. Terms of a sum may come as varying values,
    since the checker does not know that a product of shards is a term.
    """
    types: Any = import_module("spmd_types")
    axis = torch.distributed.group.WORLD if group is None else group
    if src == "P" and types.get_local_type(x).get(types.normalize_axis(axis)) is types.V:
        src = "V"
    start, end = (types.S(t) if isinstance(t, int) else getattr(types, t) for t in (src, dst))
    return getattr(types.rules, rule)(x, axis, src=start, dst=end)


def spmd_local(outputs: Any, *inputs: Tensor | None, partial: bool = False) -> None:
    """Give outputs the type of the inputs that they are computed from, for `spmd_types`.

    Args:
        outputs: The result of an autograd function that computes without communication.
        inputs: The tensors that the values come from; the others count as ignored.
        partial: Whether backward sums gradients, so that an invariant input becomes replicated.
    """
    types: Any = import_module("spmd_types")
    given = [x for x in inputs if x is not None]
    types.rules.ignore(*given)
    found: dict[Any, Any] = {}
    for x in given:
        for axis, kind in types.get_local_type(x).items():
            kind = types.R if partial and kind is types.I else kind
            found[axis] = types.V if found.get(axis, kind) is not kind else kind
    for each in outputs if isinstance(outputs, tuple) else (outputs,):
        types.assert_type(each, found)


class _Whole(Function):
    """A collective on whole tensors; its backward runs its adjoint."""

    _run: ClassVar[Callable[..., Tensor]]
    _adjoint: ClassVar[Callable[[], type[Function]]]  # called late: some are defined further down
    _types: ClassVar[tuple[str, str, str]]  # rule, placement of the input and of the result

    @classmethod
    def forward(cls, ctx: Any, x: Tensor, group: Group = None) -> Tensor:
        ctx.way = cls._adjoint(), group  # tensor_parallel reads it where it follows a graph
        return cls._run(x, group)

    @classmethod
    def spmd_typecheck(cls, *, x: Tensor, group: Group) -> Any:
        return spmd_type(x, group, *cls._types)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        adjoint, group = ctx.way
        return _backward(adjoint, grads[0], group, group), None


class Copy(_Whole):
    """Identity forward, sum over the ranks backward."""

    _run = staticmethod(lambda x, group: x.view_as(x))
    _adjoint = staticmethod(lambda: Reduce)
    _types = "convert", "I", "R"


class Reduce(_Whole):
    """Sum over the ranks forward, identity backward."""

    _run = staticmethod(shards.sum_over_ranks)
    _adjoint = staticmethod(lambda: Copy)
    _types = "all_reduce", "P", "I"


class AllReduce(_Whole):
    """Sum over the ranks in both directions."""

    _run = staticmethod(shards.sum_over_ranks)
    _adjoint = staticmethod(lambda: AllReduce)
    _types = "all_reduce", "P", "R"


class _Along(Function):
    """A collective along a dim; its backward runs its adjoint."""

    _run: ClassVar[Callable[..., Tensor]]
    _adjoint: ClassVar[Callable[[], type[Function]]]
    # Rule, placement of the input and of the result; None stands for the shard along the dim.
    _types: ClassVar[tuple[str, str | None, str | None]]

    @classmethod
    def spmd_typecheck(cls, *, x: Tensor, dim: int, group: Group) -> Any:
        rule, src, dst = cls._types
        return spmd_type(x, group, rule, dim if src is None else src, dim if dst is None else dst)

    @classmethod
    def forward(
        cls, ctx: Any, x: Tensor, dim: int, group: Group = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        ctx.way = cls._adjoint(), dim, group, sizes
        return cls._run(x, dim, group, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        adjoint, dim, group, sizes = ctx.way
        return _backward(adjoint, grads[0], group, dim, group, sizes), None, None, None


def _summed_shard(x: Tensor, dim: int, group: Group, sizes: Sequence[int] | None) -> Tensor:
    """Return this rank's shard of a sum, not as a view, so that a model may change it in place."""
    shard = shards.sum_shard(x, dim, group, sizes)
    if shard is x or not shard._is_view():
        return shard
    alias: Tensor = shard.new_empty(0)
    alias.data = shard
    return alias


class AllGather(_Along):
    """All-gather along a dim forward; reduce-scatter backward."""

    _run = staticmethod(shards.join)
    _adjoint = staticmethod(lambda: ReduceScatter)
    _types = "all_gather", None, "R"


class ReduceScatter(_Along):
    """Reduce-scatter along a dim forward; all-gather backward."""

    _run = staticmethod(_summed_shard)
    _adjoint = staticmethod(lambda: AllGather)
    _types = "reduce_scatter", "P", None


class Gather(_Along):
    """All-gather along a dim forward; this rank's shard backward."""

    _run = staticmethod(shards.join)
    _adjoint = staticmethod(lambda: Split)
    _types = "all_gather", None, "I"


class Split(_Along):
    """This rank's shard along a dim forward; all-gather backward."""

    _run = staticmethod(shards.shard_of)
    _adjoint = staticmethod(lambda: Gather)
    _types = "convert", "I", None


class AllToAll(Function):
    """All-to-all: split along one dim, join along another; backward swaps the two dims."""

    _run = staticmethod(shards.exchange_shards)

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, split_dim: int, concat_dim: int, group: Group = None
    ) -> Tensor:
        """Return every rank's shard for this rank, joined along `concat_dim`."""
        ctx.args = concat_dim, split_dim, group
        return shards.exchange_shards(x, split_dim, concat_dim, group)

    @staticmethod
    def spmd_typecheck(*, x: Tensor, split_dim: int, concat_dim: int, group: Group) -> Any:
        """Return the type of the result."""
        return spmd_type(x, group, "all_to_all", concat_dim, split_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Send the gradients of the shards back."""
        return _backward(AllToAll, grads[0], ctx.args[-1], *ctx.args), None, None, None


def copy(x: Tensor, group: Group = None) -> Tensor:
    """Return `x`; backward sums the gradient over the ranks (enters a parallel region).

    Args:
        x: Any shape; the same values on every rank.
        group: The ranks; the default group by default.
    """
    return _call(Copy, group, x, group)


def reduce(x: Tensor, group: Group = None) -> Tensor:
    """Return the sum of every rank's `x`; the gradient passes unchanged (leaves a parallel region).

    Args:
        x: Any shape, equal on every rank.
        group: The ranks; the default group by default.
    """
    return _call(Reduce, group, x, group)


def all_reduce(x: Tensor, group: Group = None) -> Tensor:
    """Return the sum of every rank's `x`; backward sums the gradient too. Args as in `reduce`."""
    return _call(AllReduce, group, x, group)


def all_gather(
    x: Tensor, dim: int, group: Group = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return every rank's `x` joined along `dim`; backward reduce-scatters the gradient.

    Args:
        x: The same shape on every rank, except along `dim` if `sizes` is given.
        dim: The dim to join along; may be negative.
        group: The ranks; the default group by default.
        sizes: The length along `dim` on each rank, if they differ.

    Raises:
        InvalidArgumentError: `dim` is out of range, or `sizes` do not fit.
    """
    return _call(AllGather, group, x, dim, group, sizes)


def reduce_scatter(
    x: Tensor, dim: int, group: Group = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Sum `x` over the ranks and return this rank's shard along `dim`; backward all-gathers.

    16-bit floats may be summed in float32 and rounded once.

    Args:
        x: The same shape on every rank.
        dim: The dim to shard; the number of ranks must divide it, unless `sizes` is given.
        group: The ranks; the default group by default.
        sizes: The length along `dim` of each rank's shard, if they differ.

    Raises:
        InvalidArgumentError: `dim` is out of range or not divisible, or `sizes` do not fit.
    """
    return _call(ReduceScatter, group, x, dim, group, sizes)


def gather(
    x: Tensor, dim: int, group: Group = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return every rank's `x` joined along `dim`; backward keeps this rank's shard.

    Args and errors as in `all_gather`.
    """
    return _call(Gather, group, x, dim, group, sizes)


def split(
    x: Tensor, dim: int, group: Group = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return a copy of this rank's shard of `x` along `dim`; backward joins the gradients.

    `x` has the same values on every rank. Args and errors as in `reduce_scatter`.
    """
    return _call(Split, group, x, dim, group, sizes)


def all_to_all(x: Tensor, split_dim: int, concat_dim: int, group: Group = None) -> Tensor:
    """Send shard i of `x` along `split_dim` to rank i; join the received ones along `concat_dim`.

    Args:
        x: The same shape on every rank.
        split_dim: The dim to split; the number of ranks must divide it.
        concat_dim: The dim to join along; both may be negative.
        group: The ranks; the default group by default.

    Raises:
        InvalidArgumentError: A dim is out of range, or `split_dim` is not divisible.
    """
    return _call(AllToAll, group, x, split_dim, concat_dim, group)

"""Placements of a tensor on one axis, and the conversions between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from ...dist import functional, get_rank, get_world_size
from ...dist.errors import InvalidArgumentError
from ..pg_manager import describe_rank
from ..pg_manager.building import uncompiled
from .cut import shard_sizes


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the same tensor; the ranks' gradients are terms of a sum."""


@dataclass(frozen=True, slots=True)
class Invariant:
    """Every rank holds the same tensor and has the same gradient."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Every rank holds its shard along a dim.

    Args:
        dim: The dim; may be negative.
        sizes: Length of each rank's shard; None means equal shards.
    """

    dim: int
    sizes: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        sizes = "" if self.sizes is None else f", {self.sizes}"
        return f"Shard({self.dim}{sizes})"


@dataclass(frozen=True, slots=True)
class Varying:
    """Every rank holds its own tensor; their relation is not specified."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a term of a sum."""


Placement = Replicate | Invariant | Shard | Varying | Partial

Group = ProcessGroup | None


@uncompiled
def convert(
    x: Tensor, src: Placement, dst: Placement, group: Group = None, *, where: str = "the tensor"
) -> Tensor:
    """Convert `x` from placement `src` to `dst`; backward converts the gradient back.

    The gradient of a `Replicate` is a `Partial` and vice versa; that of another placement has the
    same placement. So the backward of (src, dst) is another entry of `CONVERSIONS`. `torch.compile`
    breaks the graph at this call.

    Args:
        x: This rank's tensor.
        src: Its placement on the axis.
        dst: The wanted placement.
        group: Ranks of the axis; None means the default group.
        where: Name of the tensor in messages: its module and axis, such as "'layers.0.up' on tp".

    Raises:
        InvalidArgumentError: There is no conversion from `src` to `dst`, or sizes do not fit.

    Example:
        >>> hidden = convert(share, Shard(1), Replicate(), group)
    """
    if src == dst:
        return x
    require_conversion(src, dst, where)
    return CONVERSIONS[type(src), type(dst)](x, src, dst, group)


def require_conversion(src: Placement, dst: Placement, where: str) -> None:
    """Refuse a pair of placements without a conversion; arguments are those of `convert`."""
    if src != dst and (type(src), type(dst)) not in CONVERSIONS:
        targets = [target.__name__ for kind, target in CONVERSIONS if kind is type(src)]
        raise InvalidArgumentError(
            f"{describe_rank()}: {where} is {src} and is needed as {dst}, and there is no such "
            f"conversion; {type(src).__name__} converts to {', '.join(targets) or 'nothing'}"
        )


def _own_piece(x: Tensor, _: Any, dst: Shard, group: Group) -> Tensor:
    """Return this rank's shard; its gradient, padded with zeros, is a term of a sum."""
    sizes = dst.sizes or shard_sizes(x.shape[dst.dim], get_world_size(group))
    rank = get_rank(group)
    return x.narrow(dst.dim, sum(sizes[:rank]), sizes[rank])


def _other_dim(x: Tensor, src: Shard, dst: Shard, group: Group) -> Tensor:
    if src.sizes or dst.sizes:
        raise InvalidArgumentError(
            f"{describe_rank()}: a conversion from {src} to {dst} needs equal shards: leave sizes "
            "out, or convert to Invariant() first"
        )
    return functional.all_to_all(x, dst.dim, src.dim, group)


# (src, dst) -> the conversion. The autograd functions of dist convert gradients back.
CONVERSIONS: Mapping[tuple[type, type], Callable[[Tensor, Any, Any, Group], Tensor]] = {
    (Invariant, Replicate): lambda x, _, __, group: functional.copy(x, group),
    (Partial, Invariant): lambda x, _, __, group: functional.reduce(x, group),
    (Partial, Replicate): lambda x, _, __, group: functional.all_reduce(x, group),
    (Partial, Shard): lambda x, _, dst, group: functional.reduce_scatter(
        x, dst.dim, group, sizes=dst.sizes
    ),
    (Shard, Replicate): lambda x, src, _, group: functional.all_gather(
        x, src.dim, group, sizes=src.sizes
    ),
    (Shard, Invariant): lambda x, src, _, group: functional.gather(
        x, src.dim, group, sizes=src.sizes
    ),
    (Invariant, Shard): lambda x, _, dst, group: functional.split(
        x, dst.dim, group, sizes=dst.sizes
    ),
    (Replicate, Shard): _own_piece,
    (Shard, Shard): _other_dim,
    (Shard, Varying): lambda x, *_: x,
    (Varying, Partial): lambda x, *_: x,
}

"""Who holds which positions of a sequence: rank r of N holds the r-th of N equal shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...dist import functional
from ...dist.errors import InvalidArgumentError
from ..pg_manager import describe_rank
from .cp_comms import Ring, ring_of


def shard_sequence(x: Tensor, dim: int = 1, group: ProcessGroup | None = None) -> Tensor:
    """Return this rank's shard of a whole sequence.

    Nothing is sent forward. In backward the shards' gradients are joined, so that the gradient
    of a whole `x` that every rank computed alike is whole on every rank.

    Args:
        x: The whole sequence, the same on every rank; any dtype.
        dim: The sequence dim; the number of ranks must divide its length.
        group: The ranks; by default the manager's cp axis.

    Returns:
        A new tensor of length L / N along `dim`; `x` itself on one rank.

    Raises:
        InvalidArgumentError: No such dim, or a length that does not divide.
    """
    ring = ring_of(group)
    dim = _dim(x, dim)
    _bounds(x.shape[dim], ring)
    return x if ring.size == 1 else functional.split(x, dim, ring.group)


def unshard_sequence(x: Tensor, dim: int = 1, group: ProcessGroup | None = None) -> Tensor:
    """Join the ranks' shards into the whole sequence, on every rank.

    The gradient of a shard is this rank's shard of the gradient: right where every rank goes on
    to compute the same from the whole.

    Args:
        x: This rank's shard, of equal shape on all ranks; any dtype.
        dim: The sequence dim.
        group: The ranks; by default the manager's cp axis.

    Raises:
        InvalidArgumentError: No such dim.
    """
    ring = ring_of(group)
    dim = _dim(x, dim)
    return x if ring.size == 1 else functional.gather(x, dim, ring.group)


def positions(
    length: int, group: ProcessGroup | None = None, *, device: torch.device | str | None = None
) -> Tensor:
    """Return the global positions, int64 [L / N], of this rank's shard of `length` positions.

    Args:
        length: Length of the whole sequence, L; the number of ranks N must divide it.
        group: The ranks; by default the manager's cp axis.
        device: Where to put the result.

    Raises:
        InvalidArgumentError: The length does not divide.
    """
    start, stop = _bounds(length, ring_of(group))
    return torch.arange(start, stop, device=device)


def shard_batch(batch: Mapping[str, Any], group: ProcessGroup | None = None) -> dict[str, Any]:
    """Return a batch with this rank's shard of every sequence in it.

    LABELS MUST BE SHIFTED ALREADY: `labels[:, i]` is the target of `input_ids[:, i]`. A model or
    loss that shifts labels itself would lose a target at every border between ranks.

    Args:
        batch: `input_ids` [B, L], the same on every rank. `labels` [B, L] where there are any.
            `position_ids` [B, L] or [1, L], global positions; made where they are absent. Any
            other tensor of shape [B, L] is a sequence as well; everything else is passed on.
        group: The ranks; by default the manager's cp axis. Their number must divide L.

    Returns:
        A new dict; sequences are [B, L / N], and `position_ids` says which positions they are.

    Raises:
        InvalidArgumentError: No `input_ids` [B, L], labels or position_ids of another shape, or
            a length that does not divide, with the legal lengths near it.
    """
    ring = ring_of(group)
    shape = _batch_shape(batch)
    start, stop = _bounds(shape[1], ring)
    whole = dict(batch)
    if whole.get("position_ids") is None:
        ids = torch.arange(shape[1], device=whole["input_ids"].device)
        whole["position_ids"] = ids.expand(shape)
    return {
        name: value[:, start:stop].contiguous() if _is_sequence(name, value, shape) else value
        for name, value in whole.items()
    }


def shard_bounds(length: int, group: ProcessGroup | None = None) -> tuple[int, int]:
    """Return the first position of this rank's shard of `length` positions, and its end.

    Raises:
        InvalidArgumentError: The number of ranks does not divide `length`.
    """
    return _bounds(length, ring_of(group))


def _bounds(length: int, ring: Ring) -> tuple[int, int]:
    shard, rest = divmod(length, ring.size)
    if rest:
        near = [n * ring.size for n in (shard, shard + 1) if n]
        message = (
            f"{describe_rank()}: a sequence of {length} positions does not divide over "
            f"{ring.size} context-parallel ranks; lengths near it that do: "
            f"{' and '.join(map(str, near))}"
        )
        raise InvalidArgumentError(message)
    return ring.index * shard, (ring.index + 1) * shard


def _dim(x: Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        message = f"{describe_rank()}: no sequence dim {dim} in a tensor of {list(x.shape)}"
        raise InvalidArgumentError(message)
    return dim % x.ndim


def _batch_shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return [B, L] of a batch whose entries fit together."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        came = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        message = f"{describe_rank()}: a batch needs input_ids [B, L]; it has {came}"
        raise InvalidArgumentError(message)
    shape = (ids.shape[0], ids.shape[1])
    legal = {"labels": {shape}, "position_ids": {shape, (1, shape[1])}}
    for name, shapes in legal.items():
        value = batch.get(name)
        if isinstance(value, Tensor) and tuple(value.shape) not in shapes:
            message = (
                f"{describe_rank()}: {name} must be {list(shape)} as input_ids are, "
                f"and is {list(value.shape)}"
            )
            raise InvalidArgumentError(message)
    return shape


def _is_sequence(name: str, value: Any, shape: tuple[int, int]) -> bool:
    return isinstance(value, Tensor) and (name == "position_ids" or tuple(value.shape) == shape)

"""Who holds which positions of a sequence: shards of tensors and batches under any layout.

Shards are plain tensors, and nothing in one shows which positions it holds. So a call that shards
notes for its group in which order it did so. A call that is given shards later takes that order if
it is told none, and is refused if it is told another: a wrong order would give wrong numbers and
no error. Nothing is communicated; every rank runs the same calls, and finds the same.

A `Layout` is not compared: it lists the positions of each rank, and whoever shards by hand, or has
sequences in several orders under way (as `ShardedSequences` allows), says by it what these are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....dist import functional
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..cp_comms import Ring, ring_of
from .layout import LAYOUTS, Layout, layout_of_shards, layout_of_whole, require_name

DEFAULT = "zigzag"  # balanced if attention is causal, and right for every mask


def shard_sequence(
    x: Tensor,
    dim: int = 1,
    group: ProcessGroup | None = None,
    *,
    layout: Layout | str = DEFAULT,
) -> Tensor:
    """Return this rank's shard of a whole sequence.

    Nothing is sent forward. In backward the shards' gradients are joined, so that the gradient
    of a whole `x` that every rank computed the same way is whole on every rank.

    Args:
        x: The whole sequence, the same on every rank; any dtype.
        dim: The sequence dim; its length divides as the layout needs it.
        group: The ranks; by default the manager's cp axis.
        layout: The order: a `Layout`, or a name of `LAYOUTS`. Calls that are given such shards
            later take it.

    Returns:
        A new tensor of length L / N along `dim`; `x` itself on one rank.

    Raises:
        InvalidArgumentError: No such dim or layout, or a length that does not divide.
    """
    ring = ring_of(group)
    dim = _dim(x, dim)
    found = layout_of_whole(layout, x.shape[dim], ring.size)
    if ring.size == 1:
        return x
    note_order(found, ring, "shard_sequence")
    if not _in_order(found):
        shards = [found.positions(rank, x.device) for rank in range(ring.size)]
        x = x.index_select(dim, torch.cat(shards))
    return functional.split(x, dim, ring.group)


def unshard_sequence(
    x: Tensor,
    dim: int = 1,
    group: ProcessGroup | None = None,
    *,
    layout: Layout | str | None = None,
    length: int | None = None,
) -> Tensor:
    """Join the ranks' shards into the whole sequence, on every rank.

    The gradient of a shard is this rank's shard of the gradient: right if every rank goes on to
    compute the same from the whole.

    Args:
        x: This rank's shard, of equal shape on all ranks; any dtype.
        dim: The sequence dim.
        group: The ranks; by default the manager's cp axis.
        layout: The order, a `Layout` or a name of `LAYOUTS`; by default the one in which this
            group's sequences were sharded.
        length: Length of the whole sequence without padding; by default the layout's own, or of
            a name all that the ranks have.

    Returns:
        The whole sequence in order, without padding.

    Raises:
        InvalidArgumentError: No such dim or layout, a length that the shards do not fit, or
            another order than this group's sequences were sharded in.
    """
    ring = ring_of(group)
    dim = _dim(x, dim)
    layout = order_of_shards(layout, ring, "unshard_sequence", takes=True)
    found = layout_of_shards(layout, x.shape[dim], length, ring.size)
    whole = x if ring.size == 1 else functional.gather(x, dim, ring.group)
    if not _in_order(found):
        return whole.index_select(dim, found.order(x.device))
    return whole if found.length == whole.shape[dim] else whole.narrow(dim, 0, found.length)


def positions(
    length: int,
    group: ProcessGroup | None = None,
    *,
    layout: Layout | str | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the global positions, int64 [L / N], of this rank's shard of `length` positions.

    Args:
        length: Length of the whole sequence, L, which divides as the layout needs it.
        group: The ranks; by default the manager's cp axis.
        layout: The order, a `Layout` or a name of `LAYOUTS`; by default the one in which this
            group's sequences were sharded.
        device: Where to put the result.

    Raises:
        InvalidArgumentError: No such layout, a length that does not divide, or another order than
            this group's sequences were sharded in; or none was given and none was.
    """
    ring = ring_of(group)
    layout = order_of_shards(layout, ring, "positions")
    return layout_of_whole(layout, length, ring.size).positions(ring.index, device)


def shard_batch(
    batch: Mapping[str, Any],
    group: ProcessGroup | None = None,
    *,
    layout: Layout | str = DEFAULT,
) -> dict[str, Any]:
    """Return a batch with this rank's shard of every sequence in it.

    LABELS MUST BE SHIFTED ALREADY: `labels[:, i]` is the target of `input_ids[:, i]`. A model or
    loss that shifts labels itself would lose a target at every border between shards.
    `ShardedSequences.shard` shifts them, and pads lengths that do not divide.

    Args:
        batch: `input_ids` [B, L], the same on every rank. `labels` [B, L] if there are any.
            `position_ids` [B, L] or [1, L], global positions, or of several axes [axes, B, L];
            made if they are absent. Any other tensor of shape [B, L] is a sequence as well;
            everything else is passed on.
        group: The ranks; by default the manager's cp axis. L divides as the layout needs it.
        layout: The order: a `Layout`, or a name of `LAYOUTS`. Calls that are given such shards
            later take it.

    Returns:
        A new dict; sequences are [B, L / N], and `position_ids` says which positions they are.

    Raises:
        InvalidArgumentError: No `input_ids` [B, L], labels or position_ids of another shape, no
            such layout, or a length that does not divide, with the legal lengths near it.
    """
    ring = ring_of(group)
    shape = batch_shape(batch)
    found = layout_of_whole(layout, shape[1], ring.size)
    note_order(found, ring, "shard_batch")
    whole = dict(batch)
    if whole.get("position_ids") is None:
        ids = torch.arange(shape[1], device=whole["input_ids"].device)
        whole["position_ids"] = ids.expand(shape)
    return {
        name: own_shard(value, -1, found, ring.index).contiguous()
        if is_sequence(name, value, shape)
        else value
        for name, value in whole.items()
    }


def own_shard(x: Tensor, dim: int, layout: Layout, rank: int) -> Tensor:
    """Return a rank's shard of a padded whole: a view if its positions lie together."""
    if _in_order(layout):
        return x.narrow(dim, rank * layout.local_length, layout.local_length)
    return x.index_select(dim, layout.positions(rank, x.device))


def _in_order(layout: Layout) -> bool:
    """Return whether the shards put together are the padded whole as it is."""
    return layout.name == "contiguous" or layout.size == 1


def _dim(x: Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        message = f"{describe_rank()}: no sequence dim {dim} in a tensor of {list(x.shape)}"
        raise InvalidArgumentError(message)
    return dim % x.ndim


def batch_shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return [B, L] of a batch whose entries fit together.

    Raises:
        InvalidArgumentError: No `input_ids` [B, L], or labels or position_ids of another shape.
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        came = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        message = f"{describe_rank()}: a batch needs input_ids [B, L]; it has {came}"
        raise InvalidArgumentError(message)
    shape = (ids.shape[0], ids.shape[1])
    legal = {"labels": {shape}, "position_ids": {shape, (1, shape[1])}}
    for name, shapes in legal.items():
        value = batch.get(name)
        if not isinstance(value, Tensor) or tuple(value.shape) in shapes:
            continue
        if name == "position_ids" and value.ndim == 3 and tuple(value.shape[1:]) in shapes:
            continue  # positions of several axes
        message = (
            f"{describe_rank()}: {name} must be {list(shape)} as input_ids are, "
            f"and is {list(value.shape)}"
        )
        raise InvalidArgumentError(message)
    return shape


def is_sequence(name: str, value: Any, shape: tuple[int, int]) -> bool:
    """Return whether an entry of a batch [B, L] is sharded along the sequence."""
    return isinstance(value, Tensor) and (name == "position_ids" or tuple(value.shape) == shape)


@dataclass(slots=True)
class _Sharded:
    """The orders of the shards that a group made last.

    Attributes:
        calls: For each order the call that sharded in it.
        padded: The orders in which any shards so far had padding behind a sequence's end.
        taken: Whether a call has used them since: what is sharded next replaces these.
    """

    calls: dict[str, str] = field(default_factory=dict)
    padded: set[str] = field(default_factory=set)
    taken: bool = False


_sharded: WeakKeyDictionary[ProcessGroup, _Sharded] = WeakKeyDictionary()


def note_order(layout: Layout, ring: Ring, call: str, *, used_next: bool = False) -> None:
    """Note that a call has sharded sequences in this layout over the ranks of `ring`.

    Args:
        layout: Of the sequences.
        ring: The ranks.
        call: The call's name, for error messages.
        used_next: The next call is given these shards, whatever others there are.
    """
    if ring.group is None or ring.size == 1:
        return
    found = _sharded.setdefault(ring.group, _Sharded())
    if found.taken:
        found.calls, found.taken = {}, False
    found.calls[layout.name] = call
    if used_next:
        found.padded.discard(layout.name)
    if layout.padded_length > layout.length:
        found.padded.add(layout.name)


def is_padded(order: str, ring: Ring) -> bool:
    """Return whether shards in this order may have padding behind a sequence's end.

    Shards that no call has noted may have some.
    """
    found = None if ring.group is None else _sharded.get(ring.group)
    return found is None or order not in found.calls or order in found.padded


def order_of_shards(
    layout: Layout | str | None,
    ring: Ring,
    call: str,
    *,
    takes: bool = False,
    otherwise: str | None = None,
) -> Layout | str:
    """Return the order of the shards that a call is given.

    Args:
        layout: What the caller says: a `Layout`, a name of `LAYOUTS`, or None.
        ring: The ranks.
        call: The call's name, for error messages.
        takes: It uses them up: what is sharded next are other sequences.
        otherwise: The order of shards that no call has noted; None if it must be said then.

    Raises:
        InvalidArgumentError: The caller names another order than the shards have; or none, and
            they were not sharded here, or in several orders.
    """
    if not isinstance(layout, Layout | None):
        require_name(layout)
    if ring.size == 1:
        return layout or DEFAULT
    found = None if ring.group is None else _sharded.get(ring.group)
    if found is not None and isinstance(layout, Layout):
        found.taken = found.taken or takes
    if isinstance(layout, Layout):
        return layout
    if found is None:
        if layout is None and otherwise is None:
            raise _unknown(call)
        return layout or otherwise or DEFAULT
    if layout is None and len(found.calls) > 1:
        raise _ambiguous(call, found)
    order = layout or next(iter(found.calls))
    if order not in found.calls:
        raise _contradiction(call, order, found)
    found.taken = found.taken or takes
    return order


def _unknown(call: str) -> InvalidArgumentError:
    names = " or ".join(f'layout="{name}"' for name in LAYOUTS)
    return InvalidArgumentError(
        f"{call} on {describe_rank()}: which positions does each rank have? No sequence was "
        f"sharded over this group, and no layout was given. Say {names}, or shard by "
        "shard_sequence, shard_batch or ShardedSequences"
    )


def _ambiguous(call: str, found: _Sharded) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{call} on {describe_rank()}: sequences of this group were sharded in several layouts, "
        f"{_listed(found)}; say by layout= which of them these shards have"
    )


def _contradiction(call: str, order: str, found: _Sharded) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{call} on {describe_rank()}: it takes the shards to be {order}, and the sequences of "
        f"this group were sharded {_listed(found)}: give both the same layout. Shards that were "
        f"made by hand are said by a Layout: layout={order}(length, ranks)"
    )


def _listed(found: _Sharded) -> str:
    return " and ".join(f"{order} (by {call})" for order, call in found.calls.items())

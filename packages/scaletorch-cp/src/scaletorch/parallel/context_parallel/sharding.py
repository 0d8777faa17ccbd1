"""Shards of sequences and batches under any layout, and the layout that a group's shards have.

Shards are plain tensors that do not show which positions they hold. So a call that shards records
its layout for the group, and a call that takes shards later uses the recorded layout. A call that
names another layout is refused, since it would give wrong numbers and no error. Nothing is
communicated: every rank makes the same calls and records the same.

A `Layout` is not compared with the record: it lists the positions of each rank. Pass one for shards
made by hand, or if sequences in several layouts are in use (as `ShardedSequences` allows).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...dist import functional
from ...dist.errors import InvalidArgumentError
from ..pg_manager import describe_rank
from .cp_comms import Ring, ring_of
from .layouts import LAYOUTS, Layout, layout_for_length, layout_for_shards, require_name

DEFAULT = "zigzag"  # balanced for causal attention, and right for every mask


def shard_sequence(
    x: Tensor,
    dim: int = 1,
    group: ProcessGroup | None = None,
    *,
    layout: Layout | str = DEFAULT,
) -> Tensor:
    """Return this rank's shard of a whole sequence.

    Forward sends nothing. Backward gathers the shards' gradients, so that a whole `x` which every
    rank computed the same way gets the whole gradient on every rank.

    Args:
        x: The whole sequence, the same on every rank; any dtype.
        dim: The sequence dim; its length divides as the layout requires.
        group: The ranks; by default the manager's cp axis.
        layout: A `Layout`, or a name of `LAYOUTS`. Later calls on such shards use it by default.

    Returns:
        A new tensor of length L / N along `dim`; `x` itself on one rank.
    """
    ring = ring_of(group)
    found = layout_for_length(layout, x.shape[dim], ring.size)
    if ring.size == 1:
        return x
    record_layout(found, ring)
    if not _is_contiguous(found):
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
    """Gather the ranks' shards to the whole sequence, in order and without padding, on every rank.

    The gradient of a shard is this rank's shard of the gradient of the whole. That is right if
    every rank goes on to compute the same from the whole.

    Args:
        x: This rank's shard, of equal shape on all ranks; any dtype.
        dim: The sequence dim.
        group: The ranks; by default the manager's cp axis.
        layout: A `Layout` or a name of `LAYOUTS`; by default the layout in which this group's
            sequences were sharded, and no other than that.
        length: Length of the whole sequence without padding; by default the layout's own length,
            or for a name all positions of the ranks.
    """
    ring = ring_of(group)
    layout = resolve_layout(layout, ring, "unshard_sequence", consume=True)
    found = layout_for_shards(layout, x.shape[dim], length, ring.size)
    whole = x if ring.size == 1 else functional.gather(x, dim, ring.group)
    if not _is_contiguous(found):
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
        length: Length of the whole sequence, L, which divides as the layout requires.
        group: The ranks; by default the manager's cp axis.
        layout: As in `unshard_sequence`.
        device: Device of the result.
    """
    ring = ring_of(group)
    layout = resolve_layout(layout, ring, "positions")
    return layout_for_length(layout, length, ring.size).positions(ring.index, device)


def shard_batch(
    batch: Mapping[str, Any],
    group: ProcessGroup | None = None,
    *,
    layout: Layout | str = DEFAULT,
) -> dict[str, Any]:
    """Return a batch with this rank's shard of every sequence in it.

    LABELS MUST ALREADY BE SHIFTED: `labels[:, i]` is the target of `input_ids[:, i]`. A model or
    loss that shifts labels itself would lose one target at every shard boundary.
    `ShardedSequences.shard` shifts them, and pads lengths that do not divide.

    Args:
        batch: `input_ids` [B, L], the same on every rank. Optional `labels` [B, L].
            Optional `position_ids` [B, L] or [1, L], global positions, or [axes, B, L] for several
            axes; added if absent. Any other tensor of shape [B, L] is a sequence as well;
            all other entries are passed on.
        group: The ranks; by default the manager's cp axis. L divides as the layout requires.
        layout: A `Layout`, or a name of `LAYOUTS`. Later calls on such shards use it by default.

    Returns:
        A new dict; sequences are [B, L / N], and `position_ids` holds their global positions.

    Raises:
        InvalidArgumentError: No `input_ids` [B, L], labels or position_ids of another shape, no
            such layout, or a length that does not divide, with the legal lengths near it.
    """
    ring = ring_of(group)
    shape = batch_shape(batch)
    found = layout_for_length(layout, shape[1], ring.size)
    record_layout(found, ring)
    whole = dict(batch)
    if whole.get("position_ids") is None:
        ids = torch.arange(shape[1], device=whole["input_ids"].device)
        whole["position_ids"] = ids.expand(shape)
    return {
        name: local_shard(value, -1, found, ring.index).contiguous()
        if is_sequence(name, value, shape)
        else value
        for name, value in whole.items()
    }


def local_shard(x: Tensor, dim: int, layout: Layout, rank: int) -> Tensor:
    """Return a rank's shard of a padded whole: a view if the layout is contiguous."""
    if _is_contiguous(layout):
        return x.narrow(dim, rank * layout.local_length, layout.local_length)
    return x.index_select(dim, layout.positions(rank, x.device))


def _is_contiguous(layout: Layout) -> bool:
    """Return whether the concatenated shards are the padded whole in order."""
    return layout.name == "contiguous" or layout.size == 1


def batch_shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return [B, L] of a batch, whose entries must fit together."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        got = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise InvalidArgumentError(
            f"{describe_rank()}: a batch needs input_ids [B, L]; it has {got}"
        )
    shape = (ids.shape[0], ids.shape[1])
    for name in ("labels", "position_ids"):
        value = batch.get(name)
        if not isinstance(value, Tensor):
            continue
        # Positions may be the same for all rows, and may have several axes in front.
        given = value.shape[-2:] if name == "position_ids" and value.ndim == 3 else value.shape
        if given != shape and (name == "labels" or given != (1, shape[1])):
            raise InvalidArgumentError(
                f"{describe_rank()}: {name} must be {list(shape)} as input_ids are, "
                f"and is {list(value.shape)}"
            )
    return shape


def is_sequence(name: str, value: Any, shape: tuple[int, int]) -> bool:
    """Return whether an entry of a batch [B, L] is sharded along the sequence."""
    return isinstance(value, Tensor) and (name == "position_ids" or tuple(value.shape) == shape)


@dataclass(slots=True)
class _Record:
    """The layouts of the shards that were made last over a group."""

    layouts: set[str] = field(default_factory=set)
    used: bool = False  # a call has taken these shards; the next sharding call lists layouts anew
    padded: bool = False  # whether a sequence had padding; causal attention alone ignores it


_records: WeakKeyDictionary[ProcessGroup, _Record] = WeakKeyDictionary()


def record_layout(layout: Layout, ring: Ring) -> None:
    """Record that sequences were sharded in this layout over the ranks of `ring`."""
    if ring.group is None or ring.size == 1:
        return
    record = _records.setdefault(ring.group, _Record())
    if record.used:
        record.layouts, record.used = set(), False
    record.layouts.add(layout.name)
    record.padded = record.padded or layout.padded_length > layout.length


def record_padding(ring: Ring, padded: bool) -> None:
    """Record whether the shards of the next calls may have padding."""
    record = None if ring.group is None else _records.get(ring.group)
    if record is not None:
        record.padded = padded


def may_be_padded(requested: str | None, ring: Ring) -> bool:
    """Return whether the shards of a model with the `requested` layout may have padding.

    Recorded shards may have it if a sequence of the group has had it. Shards that are taken to be
    zigzag, and are not recorded so, may have it.
    """
    record = None if ring.group is None else _records.get(ring.group)
    unrecorded = record is None or "zigzag" not in record.layouts
    return (record is not None and record.padded) or (requested == "zigzag" and unrecorded)


def resolve_layout(
    layout: Layout | str | None,
    ring: Ring,
    call: str,
    *,
    consume: bool = False,
    default: str | None = None,
) -> Layout | str:
    """Return the layout of the shards that `call` takes: the one named, or the recorded one.

    `default` is the layout of unrecorded shards; None if the caller must name it. With `consume`
    the next sharding call lists the layouts anew.
    """
    if not isinstance(layout, Layout | None):
        require_name(layout)
    if ring.size == 1:
        return layout or DEFAULT
    record = None if ring.group is None else _records.get(ring.group)
    if record is None:
        layout = layout or default
        if layout is None:
            names = " or ".join(f'layout="{name}"' for name in LAYOUTS)
            raise _error(
                call,
                "the layout of these shards is unknown, since no sequence was sharded over this "
                f"group: pass {names}, or shard with shard_sequence, shard_batch or "
                "ShardedSequences",
            )
        return layout
    found = " and ".join(sorted(record.layouts))
    if layout is None and len(record.layouts) > 1:
        raise _error(
            call,
            f"sequences of this group were sharded in several layouts, {found}; pass the layout of "
            "these shards as layout=",
        )
    layout = layout or found
    if not isinstance(layout, Layout) and layout not in record.layouts:
        raise _error(
            call,
            f"it takes the shards to be {layout}, but the sequences of this group were sharded "
            f"{found}: use one layout for both; for shards made by hand, pass "
            f"layout={layout}(length, ranks)",
        )
    record.used = record.used or consume
    return layout


def _error(call: str, text: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{call} on {describe_rank()}: {text}")

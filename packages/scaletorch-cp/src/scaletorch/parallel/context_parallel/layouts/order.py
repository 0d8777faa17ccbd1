"""The order of a group's sequences: said by the call that shards, taken by those that follow.

Shards are plain tensors, and nothing in one shows which positions it holds. So a call that shards
notes for its group in which order it did so. A call that is given shards later takes that order if
it is told none, and is refused if it is told another: a wrong order would give wrong numbers and
no error. Nothing is communicated; every rank runs the same calls, and finds the same.

A `Layout` is not compared: it lists the positions of each rank, and whoever shards by hand, or has
sequences in several orders under way (as `ShardedSequences` allows), says by it what these are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..cp_comms import Ring
from .layout import LAYOUTS, Layout, require_name

DEFAULT = "zigzag"  # balanced if attention is causal, and right for every mask


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

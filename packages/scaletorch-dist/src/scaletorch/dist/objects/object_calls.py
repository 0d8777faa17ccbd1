"""Collectives of Python objects.

Objects are serialised before anything is sent, and how that went travels with their size, so that
one that cannot be sent fails on all ranks at once. Plain objects are read from a closed pickle;
others are pickled if that is allowed, and then the ranks of a job must trust each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.distributed import ProcessGroup

from ..collectives.arguments import check_member
from ..errors import InvalidArgumentError
from ..wire.backend import gather_ints, process_group
from ..wire.checks import checking, compare, tells_failure
from ..world.info import group_ranks
from .byte_moves import Buffer, all_gather_bytes, broadcast_bytes, errors_of_all, gather_bytes
from .named_types import named_types
from .packing import Terms, dump_object, load_object, pickle_allowed, refusal

Group = ProcessGroup | None

_PLAIN, _PICKLED, _FAILED = range(3)


class _Parcel(NamedTuple):
    """What one rank sends: its bytes, what is not plain in them, or why there are none."""

    content: Buffer
    not_plain: str = ""
    error: str | None = None


class _Head(NamedTuple):
    """What every rank says of its parcel before it travels."""

    length: int
    state: int
    allows: int
    named: int  # a checksum of the names of types
    entries: int


Move = Callable[[Buffer, list[_Head]], list[Buffer]]  # this rank's bytes → what it reads


@tells_failure
def broadcast_object_list(
    data: list[Any],
    src: int = 0,
    group: Group = None,
    *,
    allow_pickle: bool = True,
    types: Sequence[type] = (),
) -> None:
    """Replace the entries of `data` on every rank by those of rank `src`.

    Args:
        data: A list, as long on every rank; on `src` of objects that are plain or pickle. On `src`
            it stays.
        src: Global rank whose objects are taken.
        group: The default group by default.
        allow_pickle: Whether what is not plain may be pickled; also `SCALETORCH_ALLOW_PICKLE=0`
            switches that off.
        types: Dataclasses and enums that are plain too, the same on every rank.

    Raises:
        InvalidArgumentError: On every rank: an object cannot be sent, or the lengths differ.
        NotInGroupError: `src` or this rank is outside the group.
    """
    if not isinstance(data, list):
        message = f"broadcast_object_list fills a list in place, got {type(data).__name__}"
        raise InvalidArgumentError(message)
    members = process_group(group)
    mine = check_member(src, "src", group)
    terms = Terms(allow_pickle, named_types(types))
    if members is None or members.size() == 1:
        return
    if checking():
        compare(members, "broadcast_object_list", f"src={src}")

    def move(content: Buffer, heads: list[_Head]) -> list[Buffer]:
        _check_counts([head.entries for head in heads], members)
        whole = content if mine else bytearray(heads[group_ranks(members).index(src)].length)
        broadcast_bytes(whole, src, members)
        return [] if mine else [whole]

    parcel = _packed(list(data), terms) if mine else _Parcel(bytearray())
    for loaded in _exchange(parcel, terms, members, move, len(data)):
        data[:] = loaded


@tells_failure
def all_gather_object(
    data: Any, group: Group = None, *, allow_pickle: bool = True, types: Sequence[type] = ()
) -> list[Any]:
    """Collect an object from every rank on every rank.

    Args:
        data: Anything that is plain or pickles.
        group: The default group by default.
        allow_pickle: As in `broadcast_object_list`.
        types: As in `broadcast_object_list`.

    Returns:
        The objects in the group's order. With one process it is `[data]`, not copied.

    Raises:
        InvalidArgumentError: On every rank, if an object cannot be sent on any, or a pickled
            one does not unpickle on any.
        NotInGroupError: This rank is outside the group.
    """
    members = process_group(group)
    terms = Terms(allow_pickle, named_types(types))
    if members is None or members.size() == 1:
        return [data]
    if checking():
        compare(members, "all_gather_object")

    def move(content: Buffer, heads: list[_Head]) -> list[Buffer]:
        return all_gather_bytes(content, [head.length for head in heads], members)

    return _exchange(_packed(data, terms), terms, members, move)


@tells_failure
def gather_object(
    data: Any,
    dst: int = 0,
    group: Group = None,
    *,
    allow_pickle: bool = True,
    types: Sequence[type] = (),
) -> list[Any] | None:
    """Collect an object from every rank on rank `dst`.

    Args:
        data: Anything that is plain or pickles.
        dst: Global rank that gets the list.
        group: The default group by default.
        allow_pickle: As in `broadcast_object_list`.
        types: As in `broadcast_object_list`.

    Returns:
        On `dst` the objects in the group's order, elsewhere None.

    Raises:
        InvalidArgumentError: On every rank, if an object cannot be sent on any, or a pickled
            one does not unpickle.
        NotInGroupError: `dst` or this rank is outside the group.
    """
    members = process_group(group)
    mine = check_member(dst, "dst", group)
    terms = Terms(allow_pickle, named_types(types))
    if members is None or members.size() == 1:
        return [data]
    if checking():
        compare(members, "gather_object", f"dst={dst}")

    def move(content: Buffer, heads: list[_Head]) -> list[Buffer]:
        return gather_bytes(content, [head.length for head in heads], dst, members)

    loaded = _exchange(_packed(data, terms), terms, members, move)
    return loaded if mine else None


def _exchange(
    parcel: _Parcel, terms: Terms, members: ProcessGroup, move: Move, entries: int = 0
) -> list[Any]:
    """Tell everyone of the parcels, move their bytes if all can be sent, and restore objects."""
    failed = parcel.error is not None
    state = _FAILED if failed else _PICKLED if parcel.not_plain else _PLAIN
    named = zlib.crc32("\n".join(sorted(terms.named)).encode())
    allows = pickle_allowed(terms.allow_pickle)
    own = _Head(len(parcel.content), state, allows, named, entries)
    heads = [_Head(*head) for head in gather_ints(own, members)]
    _check_heads(heads, parcel, terms, members)
    return _loaded(move(parcel.content, heads), heads, terms, members)


def _packed(data: Any, terms: Terms) -> _Parcel:
    try:
        return _Parcel(*dump_object(data, terms))
    except Exception as error:  # the others must hear of whatever it is
        text = str(error) if isinstance(error, InvalidArgumentError) else repr(error)
        return _Parcel(bytearray(), error=text)


def _check_counts(counts: list[int], members: ProcessGroup) -> None:
    if len(set(counts)) > 1:
        lengths = ", ".join(
            f"rank {rank}: {count}"
            for rank, count in zip(group_ranks(members), counts, strict=True)
        )
        message = f"broadcast_object_list needs lists of one length, got {lengths}"
        raise InvalidArgumentError(message)


def _check_heads(heads: list[_Head], parcel: _Parcel, terms: Terms, members: ProcessGroup) -> None:
    """Raise on every rank if one cannot send, or would send what another does not take."""
    if len({head.named for head in heads}) > 1:
        named = errors_of_all(", ".join(sorted(terms.named)) or "none", members)
        raise InvalidArgumentError(f"types must be the same on every rank, got {'; '.join(named)}")
    states = [head.state for head in heads]
    forbidden = _PICKLED in states and not all(head.allows for head in heads)
    if _FAILED not in states and not forbidden:
        return
    error = parcel.error
    if error is None and parcel.not_plain and forbidden:
        error = refusal(parcel.not_plain, terms.allow_pickle)
    raise InvalidArgumentError("; ".join(errors_of_all(error, members)))


def _loaded(
    parts: list[Buffer], heads: list[_Head], terms: Terms, members: ProcessGroup
) -> list[Any]:
    """Restore objects; all ranks hear of any that failed to.

    They ask each other if anything was pickled, or a rank forbids that; plain objects do not fail
    otherwise.
    """
    may_fail = any(head.state == _PICKLED or not head.allows for head in heads)
    cause, loaded = None, []
    try:
        loaded = [load_object(part, terms) for part in parts]
    except Exception as error:
        if not may_fail:
            raise
        cause = error
    if may_fail and any(failed for (failed,) in gather_ints((cause is not None,), members)):
        errors = errors_of_all(None if cause is None else str(cause), members)
        raise InvalidArgumentError("; ".join(errors)) from cause
    return loaded

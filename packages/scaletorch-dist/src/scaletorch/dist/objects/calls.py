"""Collectives of Python objects.

Objects are serialised before anything is sent, and how that went travels with their size, so that
one that cannot be sent fails on all ranks at once. Plain objects travel by a closed codec; others
are pickled where that is allowed, and then the ranks of a job must trust each other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.distributed import ProcessGroup

from ..collectives.arguments import check_member
from ..collectives.checks import checking, compare, tells_failure
from ..collectives.raw import gather_ints, process_group
from ..errors import InvalidArgumentError
from ..info import group_ranks
from .moving import (
    Buffer,
    all_gather_bytes,
    broadcast_bytes,
    errors_of_all,
    gather_bytes,
)
from .serial import dump_object, load_object, pickle_allowed, refusal

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
    entries: int = 0


@tells_failure
def broadcast_object_list(
    data: list[Any], src: int = 0, group: Group = None, *, allow_pickle: bool = True
) -> None:
    """Replace the entries of `data` on every rank by those of rank `src`.

    Args:
        data: a list, as long on every rank; on `src` of objects that are plain or pickle. On `src`
            it stays.
        src: global rank whose objects are taken.
        group: the default group by default.
        allow_pickle: whether what is not plain may be pickled; also `SCALETORCH_ALLOW_PICKLE=0`
            switches that off.

    Raises:
        InvalidArgumentError: on every rank: an object cannot be sent, or the lengths differ.
        NotInGroupError: `src` or this rank is outside the group.
    """
    if not isinstance(data, list):
        message = f"broadcast_object_list fills a list in place, got {type(data).__name__}"
        raise InvalidArgumentError(message)
    members = process_group(group)
    mine = check_member(src, "src", group)
    if members is None or members.size() == 1:
        return
    if checking():
        compare(members, "broadcast_object_list", f"src={src}")
    parcel = _packed(list(data), allow_pickle) if mine else _Parcel(bytearray())
    heads = _heads(parcel, members, allow_pickle, len(data))
    _check_counts([head.entries for head in heads], members)
    _check_states(parcel, heads, members, allow_pickle)
    head = heads[group_ranks(members).index(src)]
    content = parcel.content if mine else bytearray(head.length)
    broadcast_bytes(content, src, members)
    parts = _loaded([] if mine else [content], heads, members, allow_pickle)
    if not mine:
        data[:] = parts[0]


@tells_failure
def all_gather_object(data: Any, group: Group = None, *, allow_pickle: bool = True) -> list[Any]:
    """Collect an object from every rank on every rank.

    Args:
        data: anything that is plain or pickles.
        group: the default group by default.
        allow_pickle: whether what is not plain may be pickled; also `SCALETORCH_ALLOW_PICKLE=0`
            switches that off.

    Returns:
        The objects in the group's order. With one process it is `[data]`, not copied.

    Raises:
        InvalidArgumentError: on every rank, where an object cannot be sent on any, or a pickled
            one does not unpickle on any.
        NotInGroupError: this rank is outside the group.
    """
    members = process_group(group)
    if members is None or members.size() == 1:
        return [data]
    if checking():
        compare(members, "all_gather_object")
    parcel = _packed(data, allow_pickle)
    heads = _heads(parcel, members, allow_pickle)
    _check_states(parcel, heads, members, allow_pickle)
    parts = all_gather_bytes(parcel.content, [head.length for head in heads], members)
    return _loaded(parts, heads, members, allow_pickle)


@tells_failure
def gather_object(
    data: Any, dst: int = 0, group: Group = None, *, allow_pickle: bool = True
) -> list[Any] | None:
    """Collect an object from every rank on rank `dst`.

    Args:
        data: anything that is plain or pickles.
        dst: global rank that gets the list.
        group: the default group by default.
        allow_pickle: whether what is not plain may be pickled; also `SCALETORCH_ALLOW_PICKLE=0`
            switches that off.

    Returns:
        On `dst` the objects in the group's order, elsewhere None.

    Raises:
        InvalidArgumentError: on every rank, where an object cannot be sent on any, or a pickled
            one does not unpickle.
        NotInGroupError: `dst` or this rank is outside the group.
    """
    members = process_group(group)
    mine = check_member(dst, "dst", group)
    if members is None or members.size() == 1:
        return [data]
    if checking():
        compare(members, "gather_object", f"dst={dst}")
    parcel = _packed(data, allow_pickle)
    heads = _heads(parcel, members, allow_pickle)
    _check_states(parcel, heads, members, allow_pickle)
    parts = gather_bytes(parcel.content, [head.length for head in heads], dst, members)
    loaded = _loaded(parts, heads, members, allow_pickle)
    return loaded if mine else None


def _packed(data: Any, allow_pickle: bool) -> _Parcel:
    try:
        return _Parcel(*dump_object(data, allow_pickle))
    except Exception as error:  # the others must hear of whatever it is
        text = str(error) if isinstance(error, InvalidArgumentError) else repr(error)
        return _Parcel(bytearray(), error=text)


def _heads(
    parcel: _Parcel, members: ProcessGroup, allow_pickle: bool, entries: int = 0
) -> list[_Head]:
    failed = parcel.error is not None
    state = _FAILED if failed else _PICKLED if parcel.not_plain else _PLAIN
    own = _Head(len(parcel.content), state, pickle_allowed(allow_pickle), entries)
    return [_Head(*head) for head in gather_ints(own, members)]


def _check_counts(counts: list[int], members: ProcessGroup) -> None:
    if len(set(counts)) > 1:
        lengths = ", ".join(
            f"rank {rank}: {count}"
            for rank, count in zip(group_ranks(members), counts, strict=True)
        )
        message = f"broadcast_object_list needs lists of one length, got {lengths}"
        raise InvalidArgumentError(message)


def _check_states(
    parcel: _Parcel, heads: list[_Head], members: ProcessGroup, allow_pickle: bool
) -> None:
    """Raise on every rank if one cannot send, or would send what another does not take."""
    states = [head.state for head in heads]
    forbidden = _PICKLED in states and not all(head.allows for head in heads)
    if _FAILED not in states and not forbidden:
        return
    error = parcel.error
    if error is None and parcel.not_plain and forbidden:
        error = refusal(parcel.not_plain, allow_pickle)
    raise InvalidArgumentError("; ".join(errors_of_all(error, members)))


def _loaded(
    parts: list[Buffer], heads: list[_Head], members: ProcessGroup, allow_pickle: bool
) -> list[Any]:
    """Restore objects; where any was pickled, all ranks hear of any that failed to."""
    pickled = any(head.state == _PICKLED for head in heads)
    cause, loaded = None, []
    try:
        loaded = [load_object(part, allow_pickle) for part in parts]
    except Exception as error:
        if not pickled:
            raise
        cause = error
    if pickled and any(failed for (failed,) in gather_ints((cause is not None,), members)):
        errors = errors_of_all(None if cause is None else str(cause), members)
        raise InvalidArgumentError("; ".join(errors)) from cause
    return loaded

"""Collectives of Python objects: the one file that pickles.

Objects are serialised before anything is sent, and whether that worked travels with their size, so
that an object that does not pickle fails on all ranks at once. What arrives is unpickled: the ranks
of a job must trust each other.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .collectives.arguments import check_member
from .collectives.checks import checking, compare, tells_failure
from .collectives.gathers import gather
from .collectives.raw import (
    all_gather_single,
    gather_ints,
    host_device,
    process_group,
    raw_broadcast,
)
from .errors import InvalidArgumentError
from .info import group_ranks

Group = ProcessGroup | None

_LONGEST_ERROR = 2000  # characters of an error's text that travel


def dump_object(data: Any) -> bytes:
    """Serialise an object.

    Raises:
        InvalidArgumentError: it does not pickle; with pickle's own text.
    """
    try:
        return pickle.dumps(data, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever the object's own methods raise
        message = f"{type(data).__name__} does not pickle: {type(error).__name__}: {error}"
        raise InvalidArgumentError(message) from error


def load_object(data: bytes | bytearray | memoryview) -> Any:
    """Restore an object that `dump_object` serialised."""
    return pickle.loads(data)


@tells_failure
def broadcast_object_list(data: list[Any], src: int = 0, group: Group = None) -> None:
    """Replace the entries of `data` on every rank by those of rank `src`.

    Args:
        data: a list, as long on every rank; on `src` of objects that pickle. On `src` it stays.
        src: global rank whose objects are taken.
        group: the default group by default.

    Raises:
        InvalidArgumentError: on every rank: an object does not pickle, or the lengths differ.
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
    payload, failed = _packed(data) if mine else (b"", False)
    heads = gather_ints((len(payload), failed, len(data)), members)
    root = group_ranks(members).index(src)
    _check_counts([head[2] for head in heads], members)
    content = _broadcast_bytes(payload, heads[root][0], src, members)
    if heads[root][1]:
        raise InvalidArgumentError(f"rank {src}: {content.decode()}")
    if not mine:
        data[:] = load_object(content)


@tells_failure
def all_gather_object(data: Any, group: Group = None) -> list[Any]:
    """Collect an object from every rank on every rank.

    Args:
        data: anything that pickles.
        group: the default group by default.

    Returns:
        The objects in the group's order. With one process it is `[data]`, not copied.

    Raises:
        InvalidArgumentError: on every rank, where an object does not pickle on any.
        NotInGroupError: this rank is outside the group.
    """
    members = process_group(group)
    if members is None or members.size() == 1:
        return [data]
    if checking():
        compare(members, "all_gather_object")
    parts = _gather_bytes(*_packed(data), members, dst=None)
    return [load_object(part) for part in parts]


@tells_failure
def gather_object(data: Any, dst: int = 0, group: Group = None) -> list[Any] | None:
    """Collect an object from every rank on rank `dst`.

    Args:
        data: anything that pickles.
        dst: global rank that gets the list.
        group: the default group by default.

    Returns:
        On `dst` the objects in the group's order, elsewhere None.

    Raises:
        InvalidArgumentError: on every rank, where an object does not pickle on any.
        NotInGroupError: `dst` or this rank is outside the group.
    """
    members = process_group(group)
    mine = check_member(dst, "dst", group)
    if members is None or members.size() == 1:
        return [data]
    if checking():
        compare(members, "gather_object", f"dst={dst}")
    parts = _gather_bytes(*_packed(data), members, dst=dst)
    return [load_object(part) for part in parts] if mine else None


def _packed(data: Any) -> tuple[bytes, bool]:
    """Return the serialised object and False, or the error's text and True."""
    try:
        return dump_object(data), False
    except InvalidArgumentError as error:
        return str(error)[:_LONGEST_ERROR].encode(errors="backslashreplace"), True


def _gather_bytes(
    payload: bytes, failed: bool, members: ProcessGroup, dst: int | None
) -> list[memoryview]:
    """Return every rank's payload, on `dst` or (None) on every rank."""
    heads = gather_ints((len(payload), failed), members)
    if any(head[1] for head in heads):
        dst = None  # every rank is to raise, so every rank gets the texts
    longest = max(length for length, _ in heads)
    own = _tensor(payload, longest).to(host_device(members))
    if dst is None:
        joined = own.new_empty(len(heads) * longest)
        all_gather_single(joined, own, group=members)
        rows = list(joined.view(len(heads), longest).unbind(0))
    else:
        rows = gather(own, dst, members)
    parts = [_bytes(row)[:length] for row, (length, _) in zip(rows, heads, strict=False)]
    errors = [
        f"rank {rank}: {bytes(part).decode()}"
        for rank, part, (_, bad) in zip(group_ranks(members), parts, heads, strict=False)
        if bad
    ]
    if errors:
        raise InvalidArgumentError("; ".join(errors))
    return parts


def _broadcast_bytes(payload: bytes, length: int, src: int, members: ProcessGroup) -> bytes:
    content = _tensor(payload, length).to(host_device(members))
    raw_broadcast(content, src, members)
    return bytes(_bytes(content))


def _check_counts(counts: list[int], members: ProcessGroup) -> None:
    if len(set(counts)) > 1:
        lengths = ", ".join(
            f"rank {rank}: {count}"
            for rank, count in zip(group_ranks(members), counts, strict=True)
        )
        message = f"broadcast_object_list needs lists of one length, got {lengths}"
        raise InvalidArgumentError(message)


def _tensor(payload: bytes, length: int) -> Tensor:
    """Return the payload as uint8, filled up to `length`."""
    return torch.frombuffer(bytearray(payload.ljust(length, b"\0")), dtype=torch.uint8)


def _bytes(data: Tensor) -> memoryview:
    """Return the bytes of a uint8 tensor; numpy, the usual way, may not be installed."""
    content = bytearray(data.numel())
    torch.frombuffer(content, dtype=torch.uint8).copy_(data)
    return memoryview(content)

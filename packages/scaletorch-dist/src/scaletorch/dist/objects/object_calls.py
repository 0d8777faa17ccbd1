"""Collectives of Python objects, and collecting the results of a distributed evaluation.

Objects are serialized before anything is sent. Their sizes, with any failure, are exchanged first,
so that an object that cannot be sent fails on all ranks at once. Objects are pickled if every rank
allows it; then the ranks must trust each other. Otherwise only plain objects can be sent.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import ProcessGroup

from ..collectives.messages import recv, send
from ..errors import InvalidArgumentError, StateError
from ..transport.ways import way_of
from ..wire.backend import (
    Group,
    bring_home,
    gather_ints,
    gather_texts,
    host_device,
    identity,
    process_group,
    raw_broadcast,
)
from ..wire.checks import begin, check_member
from ..world.info import get_rank, group_ranks
from .packing import Terms, dump_object, load_object, pickle_allowed

Buffer = bytearray | memoryview

PIECE = 1 << 30  # bytes in one message: some backends count in 31 bits
LONGEST_ERROR = 2000  # characters of an error's text that are sent
SMALL = 1 << 16  # bytes up to which padding costs less than one message per rank
_DEVICE_NAMES = ("cpu", "gpu", "npu", "cuda", "mlu", "musa", "xpu")

Move = Callable[[Buffer, list[int]], list[Buffer]]  # own bytes, all lengths → bytes to load


def broadcast_object_list(
    data: list[Any], src: int = 0, group: Group = None, *, allow_pickle: bool = True
) -> None:
    """Replace the entries of `data` on every rank by those of rank `src`.

    Args:
        data: A list, equally long on every rank; on `src` its objects must pickle, and it stays
            unchanged.
        src: Global rank whose objects are sent.
        group: The default group by default.
        allow_pickle: Whether objects may be pickled; `SCALETORCH_ALLOW_PICKLE=0` forbids it too.
            Otherwise they must be plain: types that `torch.load(weights_only=True)` reads (with
            those that `torch.serialization.add_safe_globals` has added on every rank), numpy's
            arrays and numbers, slices, ranges, dates and paths.

    Raises:
        InvalidArgumentError: An object cannot be sent, or the lengths differ; raised on every rank.
        NotInGroupError: `src` or this rank is outside the group.
    """
    if not isinstance(data, list):
        message = f"broadcast_object_list fills a list in place, got {type(data).__name__}"
        raise InvalidArgumentError(message)
    mine = check_member(src, "src", group)
    members = begin(group, "broadcast_object_list", f"src={src}")
    if members is None:
        return

    def pack(terms: Terms) -> Buffer:
        return dump_object(list(data), terms) if mine else bytearray()

    def move(content: Buffer, lengths: list[int]) -> list[Buffer]:
        whole = content if mine else bytearray(lengths[group_ranks(members).index(src)])
        _in_pieces(whole, members, raw_broadcast, src)
        return [] if mine else [whole]

    for loaded in _exchange(pack, allow_pickle, members, move, len(data)):
        data[:] = loaded


def all_gather_object(data: Any, group: Group = None, *, allow_pickle: bool = True) -> list[Any]:
    """Gather an object from every rank on every rank.

    Args:
        data: Any object that pickles; a plain one if `allow_pickle` is False.
        group: The default group by default.
        allow_pickle: As in `broadcast_object_list`.

    Returns:
        The objects in the group's order. With one process it is `[data]`, not copied.

    Raises:
        InvalidArgumentError: Some rank cannot send its object or load a received one; raised on
            every rank.
        NotInGroupError: This rank is outside the group.
    """
    members = begin(group, "all_gather_object")
    if members is None:
        return [data]
    move = partial(all_gather_bytes, members=members)
    return _exchange(partial(dump_object, data), allow_pickle, members, move)


def gather_object(
    data: Any, dst: int = 0, group: Group = None, *, allow_pickle: bool = True
) -> list[Any] | None:
    """Gather an object from every rank on rank `dst`.

    `dst` is a global rank of the group. Other args and errors as in `all_gather_object`.

    Returns:
        The objects in the group's order on `dst`, None on other ranks.
    """
    mine = check_member(dst, "dst", group)
    members = begin(group, "gather_object", f"dst={dst}")
    if members is None:
        return [data]
    move = partial(gather_bytes, dst=dst, members=members)
    loaded = _exchange(partial(dump_object, data), allow_pickle, members, move)
    return loaded if mine else None


def _exchange(
    pack: Callable[[Terms], Buffer],
    allow_pickle: bool,
    members: ProcessGroup,
    move: Move,
    entries: int = 0,
) -> list[Any]:
    """Exchange headers, move the bytes if all objects can be sent, and load the objects."""
    terms, allows = Terms(allow_pickle), pickle_allowed(allow_pickle)
    while True:
        content, error = _tried(partial(pack, terms))
        heads = gather_ints((-1 if error else len(content), allows, entries), members)
        lengths, permissions, counts = map(list, zip(*heads, strict=True))
        if len({*permissions}) == 1:
            break
        allows, terms = False, terms._replace(forbidden=True)  # some rank allows no pickles
    if min(lengths) < 0:
        _raise_together(error, members)
    if len({*counts}) > 1:
        pairs = zip(group_ranks(members), counts, strict=True)
        shown = ", ".join(f"rank {rank}: {count}" for rank, count in pairs)
        message = f"broadcast_object_list needs lists of one length, got {shown}"
        raise InvalidArgumentError(message)
    moved = move(content, lengths)
    loaded, error = _tried(lambda: [load_object(one, terms) for one in moved])
    _raise_together(error, members)
    return cast("list[Any]", loaded)


def _tried(call: Callable[[], Any]) -> tuple[Any, str]:
    """Return a call's result and "", or None and its error as text for the other ranks."""
    try:
        return call(), ""
    except InvalidArgumentError as error:
        return None, str(error)
    except Exception as error:  # the objects' own methods may raise anything
        return None, f"{type(error).__name__}: {error}"


def _raise_together(
    error: str, members: ProcessGroup, kind: type[Exception] = InvalidArgumentError, head: str = ""
) -> None:
    """Raise on every rank of the group if any has an error."""
    texts = gather_texts(error[:LONGEST_ERROR], members)
    pairs = zip(group_ranks(members), texts, strict=True)
    named = "; ".join(f"rank {rank}: {text}" for rank, text in pairs if text)
    if named:
        raise kind(head + named)


def _in_pieces(
    content: Buffer,
    members: ProcessGroup,
    call: Callable[[Tensor, int, ProcessGroup], Any],
    peer: int,
) -> None:
    """Send bytes to a rank, or fill them from it, by a call for each piece."""
    data = torch.frombuffer(content, dtype=torch.uint8)
    wire = data.to(host_device(members))
    for piece in wire.split(PIECE):
        call(piece, peer, members)
    bring_home(data, wire)


def all_gather_bytes(content: Buffer, lengths: list[int], members: ProcessGroup) -> list[Buffer]:
    """All-gather the ranks' bytes, which have these lengths, none of them 0."""
    if max(lengths) <= SMALL:
        filled = torch.zeros(max(lengths), dtype=torch.uint8)
        filled[: len(content)] = torch.frombuffer(content, dtype=torch.uint8)
        wire = filled.to(host_device(members))
        rows = cast(Tensor, way_of(wire, members).all_gather(wire, identity, False))
        return [_read(row, n) for row, n in zip(rows.unbind(), lengths, strict=True)]
    found: list[Buffer] = []
    for rank, length in zip(group_ranks(members), lengths, strict=True):
        found.append(content if rank == c10d.get_rank() else bytearray(length))
        _in_pieces(found[-1], members, raw_broadcast, rank)
    return found


def gather_bytes(
    content: Buffer, lengths: list[int], dst: int, members: ProcessGroup
) -> list[Buffer]:
    """Gather the ranks' bytes on global rank `dst`; return an empty list on other ranks."""
    rank = c10d.get_rank()
    if max(lengths) <= SMALL:
        found = all_gather_bytes(content, lengths, members)
        return found if rank == dst else []
    if rank != dst:
        _in_pieces(content, members, send, dst)
        return []
    found = []
    for source, length in zip(group_ranks(members), lengths, strict=True):
        found.append(content if source == rank else bytearray(length))
        if source != rank:
            _in_pieces(found[-1], members, recv, source)
    return found


def _read(data: Tensor, length: int) -> bytearray:
    content = bytearray(length)
    torch.frombuffer(content, dtype=torch.uint8).copy_(data[:length])
    return content


def collect_results(
    results: list[Any],
    size: int,
    device: str = "cpu",
    tmpdir: str | os.PathLike[str] | None = None,
    group: ProcessGroup | None = None,
    *,
    allow_pickle: bool = True,
) -> list[Any] | None:
    """Gather the results of samples that were assigned to the ranks round-robin.

    Args:
        results: This rank's results in the order of its samples; any objects that pickle, also
            None.
        size: Number of samples; the results of padding at the end are dropped.
        device: Where the results came from: cpu, gpu, npu, cuda, mlu, musa or xpu. It does not
            change how they are sent.
        tmpdir: A folder that all ranks share, to collect through files instead; only with "cpu".
            It is created if it is missing. The files are private to this user, and are removed.
        group: The default group by default.
        allow_pickle: As in `broadcast_object_list`.

    Returns:
        The results in the order of the samples on the group's first rank, None on other ranks.

    Raises:
        InvalidArgumentError: An argument is invalid, or (on every rank) a result cannot be sent.
        StateError: A file cannot be written or read; raised on every rank.
    """
    _check(results, size, device, tmpdir)
    members = process_group(group)
    if members is None or members.size() == 1:
        return results[:size]
    if tmpdir is not None:
        shards = _through_files(results, os.fspath(tmpdir), members, Terms(allow_pickle))
    else:
        first = group_ranks(members)[0]
        shards = gather_object(results, first, members, allow_pickle=allow_pickle)
    if shards is None:
        return None
    longest = max(map(len, shards))
    return [shard[i] for i in range(longest) for shard in shards if i < len(shard)][:size]


def _check(results: Any, size: Any, device: Any, tmpdir: Any) -> None:
    wrong = ""
    if not isinstance(results, list):
        wrong = f" needs a list of results, got {type(results).__name__}"
    elif not isinstance(size, int) or isinstance(size, bool) or size < 0:
        wrong = f" needs a size of 0 or more, got {size!r}"
    elif device not in _DEVICE_NAMES:
        wrong = f": device must be one of {', '.join(_DEVICE_NAMES)}, got {device!r}"
    elif tmpdir is not None and device != "cpu":
        wrong = f": tmpdir needs device 'cpu', got {device!r}: leave tmpdir out"
    if wrong:
        raise InvalidArgumentError(f"collect_results{wrong}")


def _through_files(
    results: list[Any], tmpdir: str, members: ProcessGroup, terms: Terms
) -> list[list[Any]] | None:
    """Collect through a temporary folder in `tmpdir` that is private to this user."""
    ranks = group_ranks(members)
    first = get_rank() == ranks[0]

    def raise_together(error: str) -> None:
        _raise_together(error, members, StateError, "collect_results through files failed: ")

    made, error = _tried(lambda: _make_folder(tmpdir) if first else "")
    raise_together(error)
    folder = all_gather_object(made, members)[0]
    try:
        own = Path(folder, f"rank-{get_rank()}")
        _, error = _tried(lambda: own.write_bytes(dump_object(results, terms)))
        raise_together(error)
        paths = [Path(folder, f"rank-{rank}") for rank in ranks] if first else []
        shards, error = _tried(lambda: [load_object(path.read_bytes(), terms) for path in paths])
        raise_together(error)
    finally:
        if first:
            shutil.rmtree(folder, ignore_errors=True)
    return shards or None


def _make_folder(parent: str) -> str:
    os.makedirs(parent, 0o700, exist_ok=True)
    return tempfile.mkdtemp(prefix="scaletorch-", dir=os.path.abspath(parent))

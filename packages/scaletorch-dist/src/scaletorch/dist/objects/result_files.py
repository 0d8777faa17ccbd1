"""Objects in files of a folder that ranks share: private, whole or not there, and checked.

A file is written under another name and renamed when it is whole. Its head says which call and
rank wrote it, how long it is and what it hashes to, so that a torn or foreign file is refused by
its name, and never removed unless it is ours.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import struct
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from ..errors import StateError
from .packing import Terms, dump_object, load_object

T = TypeVar("T")

_HEAD = struct.Struct("<16s16sqq32s")  # what it is, mark of the call, rank, length, digest
_MAGIC = b"scaletorch part\n"


class _Head(NamedTuple):
    magic: bytes
    mark: bytes
    rank: int
    length: int
    digest: bytes


def caught(call: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return what a call returns and no error, or its error's text, to tell the other ranks."""
    try:
        return call(), None
    except StateError as error:
        return None, str(error)
    except Exception as error:  # objects raise whatever they like
        return None, f"{type(error).__name__}: {error}"


def make_folder(parent: str) -> tuple[str, list[str], bytes]:
    """Make a folder for one call, which only this user may enter.

    Args:
        parent: Made, for this user alone, if it is not there.

    Returns:
        The folder, the folders above it that were made, the deepest first, and the call's mark.
    """
    missing, path = [], os.path.abspath(parent)
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for path in reversed(missing):
        os.mkdir(path, 0o700)
    folder = tempfile.mkdtemp(prefix="scaletorch-", dir=os.path.abspath(parent))
    return folder, missing, secrets.token_bytes(16)


def write_part(folder: str, mark: bytes, rank: int, data: Any, terms: Terms) -> None:
    """Write a rank's object, which appears whole or not at all."""
    content = dump_object(data, terms)
    digest = hashlib.blake2b(content, digest_size=32).digest()
    path = _path(folder, rank)
    if os.path.lexists(path):
        raise StateError(f"{path} is there already, and is not ours")
    unfinished = f"{path}.unfinished"
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(handle, "wb") as file:
            file.write(_HEAD.pack(_MAGIC, mark, rank, len(content), digest))
            file.write(content)
            file.flush()
            os.fsync(handle)
        os.rename(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def read_part(folder: str, mark: bytes, rank: int, terms: Terms) -> Any:
    """Read what `write_part` wrote.

    Raises:
        StateError: The file is foreign or damaged; with its name.
        InvalidArgumentError: Its object does not unpickle, or may not be unpickled.
    """
    path = _path(folder, rank)
    with _open(path) as file:
        head = _read_head(file)
        if head is None or (head.mark, head.rank) != (mark, rank):
            raise StateError(f"{path} is not what rank {rank} wrote: another program's file")
        rest = os.fstat(file.fileno()).st_size - _HEAD.size
        content = bytearray(head.length) if rest == head.length else bytearray()
        if rest != head.length or file.readinto(content) != head.length:
            raise StateError(f"{path} is torn: {rest} bytes of {head.length}")
    if hashlib.blake2b(content, digest_size=32).digest() != head.digest:
        raise StateError(f"{path} is damaged: its checksum is another")
    return load_object(content, terms)


def read_parts(folder: str, mark: bytes, ranks: Sequence[int], terms: Terms) -> list[Any]:
    """Read what all ranks wrote."""
    return [read_part(folder, mark, rank, terms) for rank in ranks]


def remove_parts(folder: str, mark: bytes, ranks: Sequence[int], made: Sequence[str]) -> None:
    """Remove this call's files, and the folders that it made as far as they are empty."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            with _open(_path(folder, rank)) as file:
                head = _read_head(file)
            if head is not None and head.mark == mark:
                os.unlink(_path(folder, rank))
    for path in (folder, *made):
        with contextlib.suppress(OSError):
            os.rmdir(path)


def _path(folder: str, rank: int) -> str:
    return os.path.join(folder, f"rank-{rank}")


def _open(path: str) -> Any:
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return open(os.open(path, flags), "rb")


def _read_head(file: Any) -> _Head | None:
    content = file.read(_HEAD.size)
    head = _Head(*_HEAD.unpack(content)) if len(content) == _HEAD.size else None
    return head if head is not None and head.magic == _MAGIC else None

"""Blocks of memory that other processes of this host can map, and the mapping of theirs.

A block is a file without a name, so that nothing is left behind however a process ends. Others of
the same user open it by the process's id and the file's number.
"""

from __future__ import annotations

import itertools
import os
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

VARIABLE = "SCALETORCH_SHARED_MEMORY"  # 0: no rank's memory is another's
UNKEPT = -1  # the slot of a block that others map anew each time

_numbers = itertools.count(1)
_blocks: dict[int, Block] = {}  # by the address of their memory


@dataclass(frozen=True, slots=True)
class Block:
    """How others find a block.

    Attributes:
        number: Of all blocks of this process, this one's.
        file: The open file's number in this process.
        size: In bytes.
        slot: What others are to keep their mapping of it for, in place of the one before.
    """

    number: int
    file: int
    size: int
    slot: int


def allocate(elements: int, dtype: torch.dtype, slot: int = UNKEPT) -> Tensor:
    """Return a flat tensor, of one element at least, in a block of its own; its values are zero.

    Raises:
        OSError: There is no memory, or this system has no files without a name.
    """
    size = elements * dtype.itemsize
    file = os.memfd_create("scaletorch")
    try:
        os.ftruncate(file, size)
        data = _map(f"/proc/self/fd/{file}", elements, dtype)
    except BaseException:
        os.close(file)
        raise
    storage = data.untyped_storage()
    _blocks[storage.data_ptr()] = Block(next(_numbers), file, size, slot)
    weakref.finalize(storage, _release, storage.data_ptr(), file).atexit = False
    return data


def block_of(data: Tensor) -> Block | None:
    """Return the block that a tensor fills from its first byte on, if there is one."""
    storage = data.untyped_storage()
    block = _blocks.get(storage.data_ptr())
    whole = block is not None and data.storage_offset() == 0 and data.is_contiguous()
    return block if whole else None


def attach(process: int, file: int, size: int) -> Tensor:
    """Map another process's block, as bytes.

    Raises:
        OSError: It cannot be opened, or is not that large.
    """
    path = f"/proc/{process}/fd/{file}"
    if os.stat(path).st_size != size:
        raise OSError(f"block {file} of process {process} does not have {size} bytes")
    return _map(path, size, torch.uint8)


def _map(path: str, elements: int, dtype: torch.dtype) -> Tensor:
    try:
        return torch.from_file(path, shared=True, size=elements, dtype=dtype)
    except RuntimeError as error:
        raise OSError(f"{path} cannot be mapped: {error}") from error


def _release(address: int, file: int) -> None:
    del _blocks[address]
    os.close(file)

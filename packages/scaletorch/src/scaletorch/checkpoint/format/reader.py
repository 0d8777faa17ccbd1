"""Storage for torch.distributed.checkpoint: checks what is read, and copies no more than that."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..errors import DamagedCheckpointError
from .files import BLOCK, as_bytes, map_file, view_as
from .metadata import Stored


class CheckpointReader(StorageReader):
    """Reads a checkpoint's files; all that a rank will read is checked before anything is copied.

    Args:
        folder: The checkpoint.
        metadata: What is in it.
        sizes: Of its files.
    """

    def __init__(self, folder: Path, metadata: Metadata, sizes: Mapping[str, int]) -> None:
        self._folder, self._metadata, self._sizes = folder, metadata, sizes
        self._files: dict[str, Tensor] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader is for one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the reader was made with."""
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check the sizes of the files and the blocks that this rank will read.

        Raises:
            DamagedCheckpointError: They are not what was written.
        """
        checked: set[tuple[str, int]] = set()
        for item in plan.items:
            stored = self._metadata.storage_data[item.storage_index]
            memory = self._bytes(stored)
            for block in _blocks(item, self._entry(item)) if stored.crc32 is not None else ():
                start = block * BLOCK
                if (stored.file, stored.offset + start) in checked:
                    continue
                checked.add((stored.file, stored.offset + start))
                if zlib.crc32(as_bytes(memory[start : start + BLOCK])) != stored.crc32[block]:
                    raise DamagedCheckpointError(
                        f"{self._folder / stored.file} has changed at byte "
                        f"{stored.offset + start}, in {item.storage_index.fqn}: its checksum is "
                        "another"
                    )
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy this rank's parts into their places."""
        for item in plan.items:
            chunk = self._chunk(item, self._entry(item))
            for dim, (start, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                chunk = chunk.narrow(dim, start, length)
            planner.resolve_tensor(item).copy_(chunk)
        self._files.clear()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _entry(self, item: ReadItem) -> TensorStorageMetadata:
        entry = self._metadata.state_dict_metadata[item.storage_index.fqn]
        if not isinstance(entry, TensorStorageMetadata):
            raise DamagedCheckpointError(f"{item.storage_index.fqn} is no tensor")
        return entry

    def _chunk(self, item: ReadItem, entry: TensorStorageMetadata) -> Tensor:
        memory = self._bytes(self._metadata.storage_data[item.storage_index])
        return view_as(memory, entry.properties.dtype, _saved_shape(item, entry))

    def _bytes(self, stored: Stored) -> Tensor:
        if stored.file not in self._files:
            path, size = self._folder / stored.file, self._sizes.get(stored.file, 0)
            self._files[stored.file] = map_file(path, size)
        memory = self._files[stored.file][stored.offset : stored.offset + stored.length]
        if memory.numel() != stored.length:
            message = f"{self._folder / stored.file} ends before {stored.offset + stored.length}"
            raise DamagedCheckpointError(message)
        return memory

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say that a reader takes no other folder than its own."""
        return False


def _blocks(item: ReadItem, entry: TensorStorageMetadata) -> range:
    """Return the numbers of the blocks of a chunk that hold what an item reads."""
    shape = _saved_shape(item, entry)
    strides = torch.empty(shape, device="meta").stride()
    low = sum(at * stride for at, stride in zip(item.storage_offsets, strides, strict=True))
    span = zip(item.lengths, strides, strict=True)
    high = low + sum((length - 1) * stride for length, stride in span) + 1
    size = entry.properties.dtype.itemsize
    return range(low * size // BLOCK, -(-high * size // BLOCK))


def _saved_shape(item: ReadItem, entry: TensorStorageMetadata) -> torch.Size:
    return entry.chunks[item.storage_index.index or 0].sizes

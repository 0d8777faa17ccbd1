"""Storage for torch.distributed.checkpoint: one safetensors file a rank, one JSON description."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ...dist import get_rank
from ..errors import CheckpointError
from . import folders
from .files import flush, plan_file, write_tensor
from .metadata import METADATA, Stored, seal, to_json


class CheckpointWriter(StorageWriter):
    """Writes one checkpoint, which has its name only once all of it is on the disk.

    Args:
        root: The folder that holds the checkpoints.
        step: The number of this one.
        keep: How many finished ones to leave; None leaves all.
        document: What to describe beside the entries; JSON.
    """

    def __init__(
        self, root: Path, step: int, keep: int | None, document: Mapping[str, Any]
    ) -> None:
        self._root, self._step, self._keep, self._document = root, step, keep, document
        final = folders.step_folder(root, step)
        self._folder = final.with_name(final.name + folders.UNFINISHED)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer is for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the folder, on one rank."""
        if is_coordinator:
            folders.start(self._root, self._step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Leave the plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file."""
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan.items, planner) if plan.items else [])
        return done

    def _write(self, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        name = f"rank-{get_rank():05d}.safetensors"
        items = sorted(items, key=lambda item: (-_dtype(item).itemsize, *_key(item)))  # aligned
        slots = [(_slot_name(item), _dtype(item), _chunk_shape(item)) for item in items]
        beginning, starts, _ = plan_file(slots, {"format": "pt", "step": str(self._step)})
        results = []
        with (self._folder / name).open("xb") as file:
            file.write(beginning)
            for item, start in zip(items, starts, strict=True):
                tensor = planner.resolve_data(item)
                if not isinstance(tensor, Tensor):
                    raise CheckpointError(f"{item.index.fqn} is no tensor")
                stored = Stored(name, start, tensor.nbytes, write_tensor(file, tensor))
                results.append(WriteResult(item.index, tensor.nbytes, stored))
            flush(file)
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Describe what all ranks have written, and give the checkpoint its name."""
        written = [result for own in results for result in own]
        metadata.storage_data = {each.index: each.storage_data for each in written}
        document = dict(self._document) | (metadata.planner_data or {})
        document |= {"files": self._sizes(written), "entries": to_json(metadata)}
        with (self._folder / METADATA).open("x", encoding="utf-8") as file:
            file.write(seal(document))
            file.flush()
            os.fsync(file.fileno())
        folders.finish(self._root, self._step, self._keep)

    def _sizes(self, written: list[WriteResult]) -> dict[str, int]:
        """Return the sizes of all ranks' files.

        Raises:
            CheckpointError: One is not to be seen from here.
        """
        sizes = {}
        for name in sorted({result.storage_data.file for result in written}):
            try:
                sizes[name] = (self._folder / name).stat().st_size
            except OSError as error:
                raise CheckpointError(
                    f"{self._folder / name} was written by another rank and cannot be seen here: "
                    "checkpoints need a folder that all machines share"
                ) from error
        return sizes

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say that a writer takes no other folder than its own."""
        return False


def _dtype(item: WriteItem) -> torch.dtype:
    return item.tensor_data.properties.dtype  # type: ignore[union-attr]


def _chunk_shape(item: WriteItem) -> torch.Size:
    return item.tensor_data.chunk.sizes  # type: ignore[union-attr]


def _key(item: WriteItem) -> tuple[str, tuple[int, ...]]:
    return item.index.fqn, tuple(item.index.offset or ())


def _slot_name(item: WriteItem) -> str:
    """Name a chunk: as its entry if it is the whole, else with its offsets."""
    name, offsets = _key(item)
    whole = item.tensor_data is not None and _chunk_shape(item) == item.tensor_data.size
    return name if whole else f"{name}@{','.join(map(str, offsets))}"

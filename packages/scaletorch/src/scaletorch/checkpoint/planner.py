"""Which parts go where: our entries told to torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from .errors import DamagedCheckpointError
from .state.entries import Entry


class PartsSavePlanner(DefaultSavePlanner):
    """Plans to save what each rank was given to write; DCP checks that it makes up the whole.

    Args:
        notes: What the first rank is to know of this one beside tensors; plain mappings of names,
            which are joined over ranks.
    """

    def __init__(self, notes: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._notes = notes

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Take the entries to save."""
        self.entries: dict[str, Entry] = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Name this rank's parts."""
        items = [
            _write_item(name, entry, number)
            for name, entry in self.entries.items()
            for number in range(len(entry.parts))
        ]
        self._sources = {
            MetadataIndex(name, part.offsets): part.tensor
            for name, entry in self.entries.items()
            for part in entry.parts
        }
        self.plan = SavePlan(items, planner_data=self._notes)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check that the parts make up whole tensors, and join what ranks have noted."""
        plans, metadata = super().create_global_plan(all_plans)
        joined: dict[str, dict[str, Any]] = {}
        for plan in all_plans:
            for kind, note in plan.planner_data.items():
                joined.setdefault(kind, {}).update(note)
        return plans, replace(metadata, planner_data=joined)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the memory of a part."""
        return self._sources[write_item.index]


def _write_item(name: str, entry: Entry, number: int) -> WriteItem:
    part = entry.parts[number]
    chunk = ChunkStorageMetadata(torch.Size(part.offsets), part.tensor.shape)
    data = TensorWriteData(chunk, TensorProperties(entry.dtype), torch.Size(entry.shape))
    return WriteItem(MetadataIndex(name, part.offsets), WriteItemType.SHARD, tensor_data=data)


class PartsLoadPlanner(LoadPlanner):
    """Plans to read this rank's parts, whichever chunks they were saved in."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the entries to load, and what was saved."""
        self.entries: dict[str, Entry] = state_dict
        self.saved = {} if metadata is None else metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """Find the chunks that this rank's parts were saved in.

        Raises:
            DamagedCheckpointError: They are not all there.
        """
        items: list[ReadItem] = []
        for name, entry in self.entries.items():
            saved = self.saved[entry.source]
            if not isinstance(saved, TensorStorageMetadata):
                raise DamagedCheckpointError(f"{entry.source} is no tensor")
            chunks = [
                ChunkStorageMetadata(torch.Size(part.offsets), part.tensor.shape)
                for part in entry.parts
            ]
            reads = create_read_items_for_chunk_list(name, saved, chunks)
            found = sum(prod(read.lengths) for read in reads)
            wanted = sum(part.tensor.numel() for part in entry.parts)
            if found != wanted:
                raise DamagedCheckpointError(
                    f"{entry.source} has {found} of the {wanted} elements that this rank needs"
                )
            items += [_read_from(read, entry.source) for read in reads]
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are: each rank reads its own."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the memory that is read into."""
        index = read_item.dest_index
        tensor = self.entries[index.fqn].parts[index.index or 0].tensor
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: it was read into its place."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Refuse: there are tensors alone."""
        raise DamagedCheckpointError(f"{read_item.storage_index.fqn} is no tensor")

    def resolve_bytes(self, read_item: ReadItem) -> Any:
        """Refuse: there are tensors alone."""
        raise DamagedCheckpointError(f"{read_item.storage_index.fqn} is no tensor")


def _read_from(read: ReadItem, source: str) -> ReadItem:
    index = read.storage_index
    return replace(read, storage_index=MetadataIndex(source, index.offset, index.index))

"""A checkpoint's entries: whole tensors by name, and this rank's rectangles of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...parallel.pg_manager import ProcessGroupManager
from .model_tensors import Part

Index = tuple[str, tuple[int, ...]]  # an entry's name, and the offsets of a rectangle


@dataclass(frozen=True, slots=True)
class Entry:
    """A whole tensor, and the rectangles of it that this rank holds."""

    shape: tuple[int, ...]  # shape of the whole tensor
    dtype: torch.dtype
    parts: list[Part]  # the rectangles on this rank
    source: str = ""  # the saved entry to load from, which may have another dtype


@dataclass(slots=True)
class Record:
    """The entries that a rank saves."""

    tensors: dict[str, Entry] = field(default_factory=dict)  # entries by name
    # names of entries that are equal on all replicas of the rank (cp x dp)
    replicated: set[str] = field(default_factory=set)
    # names of experts' entries, whose replicas are the edp group instead
    experts: set[str] = field(default_factory=set)
    # numbers of the optimizer, by entry name, as JSON
    scalars: dict[str, object] = field(default_factory=dict)
    # the name that a tied parameter is saved under -> all its names
    ties: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, entry: Entry, *, replicated: bool, experts: bool = False) -> None:
        """Add an entry; if the name exists, add its rectangles to that entry."""
        self.tensors.setdefault(name, replace(entry, parts=[])).parts.extend(entry.parts)
        if replicated:
            self.replicated.add(name)
        if experts:
            self.experts.add(name)


def share_out(record: Record, manager: ProcessGroupManager) -> dict[str, Entry]:
    """Return the entries that this rank writes, so that only one rank writes each rectangle.

    The first tp rank that has a rectangle writes it; among replicas, the rank with the fewest bytes
    so far. Every rank computes this without communication.
    """
    loads, of_experts = [0] * manager.cp_dp_size, [0] * manager.edp_size
    ours: dict[str, Entry] = {}
    parts = [
        (name, part)
        for name, entry in record.tensors.items()
        for part in entry.parts
        if part.owner == manager.tp_rank
    ]
    parts.sort(key=lambda found: (-found[1].tensor.nbytes, found[0], found[1].offsets))
    for name, part in parts:
        if name in record.replicated:
            experts = name in record.experts
            taken = of_experts if experts else loads
            writer = taken.index(min(taken))
            taken[writer] += part.tensor.nbytes
            if writer != (manager.edp_rank if experts else manager.cp_dp_rank):
                continue
        entry = record.tensors[name]
        ours.setdefault(name, replace(entry, parts=[])).parts.append(part)
    return ours


def stage(entries: dict[str, Entry], buffers: dict[Index, Tensor]) -> dict[str, Entry]:
    """Return copies of the entries in CPU memory; `buffers` keeps it for the next call."""
    used: dict[Index, Tensor] = {}
    staged: dict[str, Entry] = {}
    devices = set()
    for name, entry in entries.items():
        parts = []
        for part in entry.parts:
            source, key = part.tensor, (name, part.offsets)
            copy = buffers.get(key)
            if copy is None or copy.shape != source.shape or copy.dtype != source.dtype:
                pinned = source.is_cuda
                copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
            used[key] = copy.copy_(source, non_blocking=True)
            devices.add(source.device)
            parts.append(replace(part, tensor=copy))
        staged[name] = replace(entry, parts=parts)
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    buffers.clear()
    buffers.update(used)
    return staged

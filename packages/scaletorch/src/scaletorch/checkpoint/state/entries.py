"""A checkpoint's entries: whole tensors by name, and the parts of them on this rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...parallel.pg_manager import ProcessGroupManager
from .held import Part

Index = tuple[str, tuple[int, ...]]  # an entry's name, and where a part begins


@dataclass(frozen=True, slots=True)
class Entry:
    """A whole tensor of which this rank has parts.

    Attributes:
        shape: The whole's.
        dtype: Its dtype.
        parts: What is here.
        source: The saved entry to load from, which may have another dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[Part]
    source: str = ""


@dataclass(slots=True)
class Record:
    """The entries that a rank saves.

    Attributes:
        tensors: Entries by name.
        replicated: Names of those that all replicas of the rank (cp x dp) have the same of.
        experts: Those of them that are experts', whose replicas are others (edp).
        scalars: Numbers of the optimizer, by entry name, as JSON.
        ties: The name that a tied parameter is saved by -> all its names.
    """

    tensors: dict[str, Entry] = field(default_factory=dict)
    replicated: set[str] = field(default_factory=set)
    experts: set[str] = field(default_factory=set)
    scalars: dict[str, object] = field(default_factory=dict)
    ties: dict[str, list[str]] = field(default_factory=dict)

    @property
    def notes(self) -> dict[str, Mapping[str, Any]]:
        """Facts about this rank for the first rank, beside tensors."""
        return {"scalars": self.scalars, "ties": self.ties}

    def add(self, name: str, entry: Entry, *, replicated: bool, experts: bool = False) -> None:
        """Add an entry, or its parts to the one of that name."""
        self.tensors.setdefault(name, replace(entry, parts=[])).parts.extend(entry.parts)
        if replicated:
            self.replicated.add(name)
        if experts:
            self.experts.add(name)


def share_out(record: Record, manager: ProcessGroupManager) -> dict[str, Entry]:
    """Return the parts that this rank is to write, of each that several ranks have one.

    What is replicated over tp is its first owner's; what all replicas have is dealt out, the
    largest first, always to the one with least. Every rank finds that alone.
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
    """Return the entries with parts in memory of their own on the CPU.

    Args:
        entries: What is to be copied.
        buffers: Memory of earlier copies; what fits is used again, and all else let go of.
    """
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

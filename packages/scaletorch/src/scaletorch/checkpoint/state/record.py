"""A checkpoint's entries: whole tensors by name, and this rank's rectangles of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...parallel.pg_manager import ProcessGroupManager
from .model_tensors import Rectangle

Index = tuple[str, tuple[int, ...]]  # an entry's name, and the offsets of a rectangle


@dataclass(frozen=True, slots=True)
class Entry:
    """A whole tensor, and the rectangles of it that this rank holds."""

    shape: tuple[int, ...]  # shape of the whole tensor
    dtype: torch.dtype
    rectangles: list[Rectangle]
    source: str = ""  # the saved entry to load from, which may have another dtype
    replicas: str = (
        ""  # the axis of ranks with equal rectangles, see `ModelTensor.replicas`; '' for none
    )


@dataclass(slots=True)
class Record:
    """The entries that a rank saves."""

    tensors: dict[str, Entry] = field(default_factory=dict)  # entries by name
    # numbers of the optimizer, by entry name, as JSON
    scalars: dict[str, object] = field(default_factory=dict)
    # the name that a tied parameter is saved under -> all its names
    ties: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, entry: Entry) -> None:
        """Add an entry; if the name exists, add its rectangles to that entry."""
        known = self.tensors.setdefault(name, replace(entry, rectangles=[]))
        known.rectangles.extend(entry.rectangles)


def share_out(record: Record, manager: ProcessGroupManager) -> dict[str, Entry]:
    """Return the entries that this rank writes, so that only one rank writes each rectangle.

    The first tp rank that has a rectangle writes it; among replicas, the rank with the fewest bytes
    so far. Every rank computes this without communication.
    """
    loads = {"cp_dp": [0] * manager.cp_dp_size, "edp": [0] * manager.edp_size}
    ranks = {"cp_dp": manager.cp_dp_rank, "edp": manager.edp_rank}
    ours: dict[str, Entry] = {}
    found = [(n, rect) for n, entry in record.tensors.items() for rect in entry.rectangles]
    found.sort(key=lambda pair: (-pair[1].tensor.nbytes, pair[0], pair[1].offsets))
    for name, rectangle in found:
        entry = record.tensors[name]
        if rectangle.owner != manager.tp_rank:
            continue
        if entry.replicas:
            load = loads[entry.replicas]
            writer = load.index(min(load))
            load[writer] += rectangle.tensor.nbytes
            if writer != ranks[entry.replicas]:
                continue
        ours.setdefault(name, replace(entry, rectangles=[])).rectangles.append(rectangle)
    return ours


def stage(entries: dict[str, Entry], buffers: dict[Index, Tensor]) -> dict[str, Entry]:
    """Return copies of the entries in CPU memory; `buffers` keeps it for the next call."""
    used: dict[Index, Tensor] = {}
    staged: dict[str, Entry] = {}
    devices = set()
    for name, entry in entries.items():
        staged[name] = replace(entry, rectangles=[])
        for rectangle in entry.rectangles:
            source, key = rectangle.tensor, (name, rectangle.offsets)
            copy = buffers.get(key)
            if copy is None or copy.shape != source.shape or copy.dtype != source.dtype:
                copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            used[key] = copy.copy_(source, non_blocking=True)
            devices.add(source.device)
            staged[name].rectangles.append(replace(rectangle, tensor=copy))
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    buffers.clear()
    buffers.update(used)
    return staged

"""A checkpoint's entries: whole tensors by name, this rank's rectangles, and random generators.

Generators are restored on the layout that saved them, and seeded anew on any other.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from ...compose.draws import seed_ranks
from ...parallel.pg_manager import ProcessGroupManager
from ..format.metadata import SavedTensor
from .model_tensors import Rectangle

Index = tuple[str, tuple[int, ...]]  # an entry's name, and the offsets of a rectangle


@dataclass(frozen=True, slots=True)
class Entry:
    """A whole tensor, and the rectangles of it that this rank holds."""

    shape: tuple[int, ...]  # shape of the whole tensor
    dtype: torch.dtype
    rectangles: list[Rectangle]
    source: str = ""  # the saved entry to load from, which may have another dtype
    replicas: str = ""  # the axis of ranks with equal rectangles (`ModelTensor.replicas`), if any


@dataclass(slots=True)
class Record:
    """The entries that a rank saves."""

    tensors: dict[str, Entry] = field(default_factory=dict)  # entries by name
    scalars: dict[str, object] = field(default_factory=dict)  # the optimizer's numbers, as JSON
    ties: dict[str, list[str]] = field(default_factory=dict)  # saved name -> all tied names

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


def _device_module(device: torch.device) -> Any:
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device)


def record_random(record: Record, manager: ProcessGroupManager, device: torch.device) -> None:
    """Add the states of this rank's generators: torch's, Python's, numpy's if it is in use."""
    python: dict[str, Any] = {"python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        python["numpy"] = [str(name), keys.tolist(), *rest]
    written = torch.frombuffer(bytearray(json.dumps(python).encode()), dtype=torch.uint8)
    states = {"cpu": torch.get_rng_state(), "python": written}
    if (module := _device_module(device)) is not None:
        states[device.type] = module.get_rng_state(device)
    for kind, state in states.items():
        entry = Entry(tuple(state.shape), torch.uint8, [Rectangle((0,), state, manager.tp_rank)])
        record.add(f"random.{manager.global_rank}.{kind}", entry)


def find_random(saved: Mapping[str, SavedTensor], manager: ProcessGroupManager) -> dict[str, Entry]:
    """Return the entries of this rank's saved states, with new memory to be filled."""
    targets = {}
    for name, entry in saved.items():
        if name.rpartition(".")[0] == f"random.{manager.global_rank}":
            memory = torch.empty(entry.shape, dtype=torch.uint8)
            whole = [Rectangle((0,), memory, manager.tp_rank)]
            targets[name] = Entry(entry.shape, torch.uint8, whole, name)
    return targets


def restore_random(found: Mapping[str, Entry], device: torch.device) -> None:
    """Set this rank's generators to the states that `find_random` found."""
    states = {name.rpartition(".")[2]: e.rectangles[0].tensor for name, e in found.items()}
    torch.set_rng_state(states["cpu"])
    if (module := _device_module(device)) is not None and device.type in states:
        module.set_rng_state(states[device.type], device)
    saved = json.loads(bytes(states["python"].tolist()))
    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))
    if "numpy" in saved and (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = saved["numpy"]
        numpy.random.set_state((name, numpy.array(keys, "uint32"), *rest))


def seed_anew(seed: int, manager: ProcessGroupManager) -> None:
    """Seed this rank's generators from a saved seed, on a layout other than the one that saved."""
    seed_ranks(seed, manager)
    own = torch.initial_seed()
    random.seed(own)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(own % 2**32)


def seed_material(step: int) -> int:
    """Return a 32-bit seed computed from this rank's generator and the step."""
    state = bytes(torch.get_rng_state().tolist())
    return int.from_bytes(blake2b(state + b"%d" % step, digest_size=4).digest(), "little")

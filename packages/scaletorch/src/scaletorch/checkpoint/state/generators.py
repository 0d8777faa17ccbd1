"""Random generators of each rank: restored on the layout that saved them, else seeded anew."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from ...compose.draws import seed_ranks
from ...parallel.pg_manager import ProcessGroupManager
from ..format.metadata import SavedTensor
from .model_tensors import Rectangle
from .record import Entry, Record


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
        whole = [Rectangle((0,), state, manager.tp_rank)]
        entry = Entry((state.numel(),), torch.uint8, whole)
        record.add(f"random.{manager.global_rank}.{kind}", entry)


def find_random(
    saved: Mapping[str, SavedTensor], manager: ProcessGroupManager, targets: dict[str, Entry]
) -> dict[str, Tensor]:
    """Return new tensors for this rank's saved states, and add them to `targets` to be filled."""
    states = {}
    for name, entry in saved.items():
        prefix, _, kind = name.rpartition(".")
        if prefix == f"random.{manager.global_rank}":
            states[kind] = torch.empty(entry.shape, dtype=torch.uint8)
            whole = [Rectangle((0,), states[kind], manager.tp_rank)]
            targets[name] = Entry(entry.shape, torch.uint8, whole, name)
    return states


def restore_random(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set this rank's generators to saved states."""
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

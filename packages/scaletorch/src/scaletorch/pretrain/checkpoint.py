"""Checkpoints of one layout: each rank's shard, complete or not there at all."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..dist import barrier, broadcast_object_list, get_rank, is_main_process
from ..dist.errors import InvalidArgumentError, StateError
from .config import PretrainConfig

META = "meta.json"


# Settings that a resumed run may change; all others decide the numbers.
FREE = {"out", "save_every", "resume", "compare", "backend", "data", "tokenizer"}


def identity(config: PretrainConfig) -> dict[str, Any]:
    """Return the settings that must agree between the run that saved and the run that resumes."""
    return {name: value for name, value in asdict(config).items() if name not in FREE}


def rank_file(folder: Path) -> Path:
    """Return this rank's file in a checkpoint."""
    return folder / f"rank-{get_rank():05d}.pt"


def save(
    config: PretrainConfig, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Path:
    """Write the state after ``step`` steps; the folder takes its name once all ranks have written.

    Returns:
        The finished folder, ``out/checkpoints/step-<step>``.
    """
    final = folder_of(config) / f"step-{step:08d}"
    unfinished = final.with_name(final.name + ".unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
    }
    torch.save(state, rank_file(unfinished))
    barrier()
    if is_main_process():
        (unfinished / META).write_text(json.dumps({"step": step, **identity(config)}, indent=2))
        os.replace(unfinished, final)
    barrier()
    return final


def folder_of(config: PretrainConfig) -> Path:
    """Return where a run keeps its checkpoints."""
    if config.out is None:
        raise InvalidArgumentError("checkpoints need a folder: pass --out")
    return config.out / "checkpoints"


def latest(config: PretrainConfig) -> Path | None:
    """Return the newest finished checkpoint, as rank 0 sees it, or None."""
    found: list[Path | None] = [None]
    if is_main_process():
        finished = sorted(p.parent for p in folder_of(config).glob(f"step-????????/{META}"))
        found = [finished[-1] if finished else None]
    broadcast_object_list(found)
    return found[0]


def refuse_mixing(config: PretrainConfig) -> None:
    """Raise when a new run would write among another run's checkpoints."""
    if config.save_every and not config.resume and latest(config) is not None:
        raise StateError(
            f"{folder_of(config)} already holds checkpoints; go on from them with --resume, "
            "or pass another --out"
        )


def load(config: PretrainConfig, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore the newest checkpoint in ``out``; return the number of steps it holds, 0 if none.

    Raises:
        StateError: the checkpoint belongs to another layout or to other settings.
    """
    folder = latest(config)
    if folder is None:
        return 0
    meta = json.loads((folder / META).read_text())
    wanted = identity(config)
    if different := [f"{k}: saved {meta[k]}, now {v}" for k, v in wanted.items() if meta[k] != v]:
        raise StateError(
            f"{folder} cannot be resumed bitwise with other settings ({'; '.join(different)}); "
            "use the saved ones, or start anew in another folder"
        )
    state = torch.load(rank_file(folder), map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    return int(meta["step"])

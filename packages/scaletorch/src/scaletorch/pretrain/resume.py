"""Going on from the last checkpoint of a run, on the same layout or on another one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import Saving, latest, load, save
from ..dist import broadcast_object_list, is_main_process
from ..dist.errors import InvalidArgumentError, StateError
from ..parallel.pg_manager import ProcessGroupManager
from .config import PretrainConfig

# Settings that a resumed run may change; all others decide the numbers, but for rounding.
FREE = frozenset(
    ("out", "save_every", "keep", "resume", "compare", "backend", "data", "tokenizer",
     "tp", "cp", "pp", "dp", "schedule", "zero", "micro_batches")
)  # fmt: skip


def identity(config: PretrainConfig, data: str) -> dict[str, Any]:
    """Return what must agree between the run that saved and the run that resumes.

    Args:
        config: Its settings.
        data: The text's digest.
    """
    settings = {name: value for name, value in asdict(config).items() if name not in FREE}
    plain: dict[str, Any] = json.loads(json.dumps(settings | {"data": data}))
    return plain


def folder_of(config: PretrainConfig) -> Path:
    """Return where a run keeps its checkpoints."""
    if config.out is None:
        raise InvalidArgumentError("checkpoints need a folder: pass --out")
    return config.out / "checkpoints"


def refuse_mixing(config: PretrainConfig) -> None:
    """Raise on every rank when a new run would write among another run's checkpoints."""
    if not config.save_every or config.resume == "auto":
        return
    found = [is_main_process() and latest(folder_of(config)) is not None]
    broadcast_object_list(found)
    if found[0]:
        raise StateError(
            f"{folder_of(config)} already holds checkpoints; go on from them with --resume auto, "
            "or pass another --out"
        )


def save_step(
    config: PretrainConfig,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    manager: ProcessGroupManager,
    data: str,
) -> Saving:
    """Begin to write the state after ``step`` steps; training goes on meanwhile."""
    return save(
        folder_of(config),
        model,
        optimizer,
        manager,
        step=step,
        extra={"settings": identity(config, data)},
        keep=config.keep or None,
        asynchronous=True,
    )


def load_last(
    config: PretrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    manager: ProcessGroupManager,
    data: str,
) -> int:
    """Restore the newest good checkpoint in ``out``; return the steps it holds, 0 if none.

    Raises:
        StateError: the checkpoint belongs to other settings, other text or another program;
            nothing was loaded.
    """
    folder, now = folder_of(config), identity(config, data)

    def check(extra: Mapping[str, Any]) -> None:
        saved = extra.get("settings")
        if not isinstance(saved, dict):
            raise StateError(f"{folder} has a checkpoint that this program did not save")
        if different := [f"{k}: saved {saved.get(k)}, now {v}" for k, v in now.items()
                         if saved.get(k) != v]:  # fmt: skip
            raise StateError(
                f"{folder} cannot be resumed with other settings ({'; '.join(different)}); "
                "use the saved ones, or start anew in another folder"
            )

    loaded = load(folder, model, optimizer, manager, check=check)
    return 0 if loaded is None else loaded.step

"""Checkpoints of a run: saving them, and resuming from the last one with any layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import CheckpointError, Saving, latest, load, save
from ..dist import broadcast_object_list, get_world_size, is_main_process
from ..dist.building import agree, caught
from ..dist.errors import InvalidArgumentError, MismatchError, NonFiniteError, StateError
from ..models import LlamaConfig
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from .config import PretrainConfig
from .progress import LOG

# Settings that a resumed run may change; the losses depend on all others.
FREE = frozenset(
    ("out", "save_every", "keep", "resume", "compare", "backend", "data", "tokenizer",
     "tp", "cp", "pp", "dp", "ep", "schedule", "zero", "micro_batches", "steps", "check_every")
)  # fmt: skip


def identity(config: PretrainConfig, data: str) -> dict[str, Any]:
    """Return the settings and the digest of the text, which must be those of the run that saved."""
    settings = {name: value for name, value in asdict(config).items() if name not in FREE}
    settings["decay_steps"] = config.decay_steps or config.steps
    plain: dict[str, Any] = json.loads(json.dumps(settings | {"data": data}))
    return plain


def folder_of(config: PretrainConfig) -> Path:
    """Return the folder of a run's checkpoints."""
    if config.out is None:
        raise InvalidArgumentError("checkpoints need a folder: pass --out")
    return config.out / "checkpoints"


def refuse_mixing(config: PretrainConfig) -> None:
    """Raise StateError on every rank if a new run would overwrite an earlier run's files."""
    if config.out is None or config.resume == "auto":
        return
    found = [_files_of_a_run(config.out) if is_main_process() else ""]
    broadcast_object_list(found)
    if found[0]:
        raise StateError(
            f"{config.out} already holds {found[0]} of an earlier run: go on from it with "
            "--resume auto, or pass another --out"
        )


def _files_of_a_run(out: Path) -> str:
    found = ["checkpoints"] if latest(out / "checkpoints") is not None else []
    log = out / LOG
    found += [LOG] if log.is_file() and log.stat().st_size else []
    return ", ".join(found)


def save_step(
    config: PretrainConfig,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    manager: ProcessGroupManager,
    data: str,
    sizes: LlamaConfig,
) -> Saving:
    """Start to save the state after `step` steps; raise on all ranks if a weight is not finite."""
    agree(f"the checkpoint after step {step}", [], error=caught(refuse_nonfinite, model, step))
    return save(
        folder_of(config),
        model,
        optimizer,
        manager,
        step=step,
        extra={"settings": identity(config, data), "model": asdict(sizes)},
        keep=config.keep or None,
        asynchronous=True,
    )


def refuse_nonfinite(model: nn.Module, step: int) -> None:
    """Raise NonFiniteError if a weight on this rank is infinite or NaN."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise NonFiniteError(
                f"after step {step} the weight {name} is not finite on {describe_rank()}; it is "
                "not saved, and the checkpoints before stay: go on from the last with "
                "--resume auto and a lower --lr"
            )


def load_last(
    config: PretrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    manager: ProcessGroupManager,
    data: str,
) -> int:
    """Restore the newest good checkpoint in `out`; return its number of steps, or 0."""
    folder, now = folder_of(config), identity(config, data)

    def check(extra: Mapping[str, Any]) -> None:
        saved = extra.get("settings")
        if not isinstance(saved, dict):
            raise StateError(f"{folder} has a checkpoint that this program did not save")
        planned = saved.get("decay_steps")
        if not config.decay_steps and planned != config.steps:
            raise StateError(
                f"the saved run falls to its lowest rate in {planned} steps, and this one in "
                f"{config.steps}: keep that with --decay-steps {planned}, or decay anew with "
                f"--decay-steps {config.steps}"
            )
        if different := [
            f"{name}: saved {saved.get(name)}, now {value}"
            for name, value in now.items()
            if name != "decay_steps" and saved.get(name) != value
        ]:
            raise StateError(
                f"{folder} cannot be resumed with other settings ({'; '.join(different)}); "
                "use the saved ones, or start anew in another folder"
            )

    loaded = load(folder, model, optimizer, manager, check=check)
    return 0 if loaded is None else loaded.step


class Saver:
    """Saves checkpoints while training goes on, and waits for the last one at the end."""

    def __init__(self, save: Callable[[int], Saving], every: int, last: int) -> None:
        self._save, self._every, self._last = save, every, last
        self._saving: Saving | None = None

    def __enter__(self) -> Saver:
        return self

    def after(self, step: int) -> None:
        """Save after `step` steps if it is a multiple of `every`, or the last step."""
        if self._every and (step % self._every == 0 or step == self._last):
            self._saving = self._save(step)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._saving is None:
            return
        if error is None:
            self._saving.wait()
        elif isinstance(error, NonFiniteError | MismatchError) or get_world_size() == 1:
            # These errors are raised on all ranks, so no rank waits for a missing one.
            with suppress(CheckpointError):
                self._saving.wait()  # the last good checkpoint may be incomplete

"""Checkpoints of a run: when they are written, and going on from the last, on any layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import CheckpointError, DamagedCheckpointError, Saving, latest, load, save
from ..checkpoint.format.folders import finished
from ..checkpoint.loading import read_document
from ..dist import broadcast_object_list, get_world_size, is_main_process
from ..dist.building import agree, caught
from ..dist.errors import InvalidArgumentError, MismatchError, NonFiniteError, StateError
from ..models import LlamaConfig
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from .config import PretrainConfig
from .report import LOG

# Settings that a resumed run may change; all others decide the numbers, but for rounding.
FREE = frozenset(
    ("out", "save_every", "keep", "resume", "compare", "backend", "data", "tokenizer",
     "tp", "cp", "pp", "dp", "ep", "schedule", "zero", "micro_batches", "steps", "check_every")
)  # fmt: skip


def identity(config: PretrainConfig, data: str) -> dict[str, Any]:
    """Return what must agree between the run that saved and the run that resumes.

    Args:
        config: Its settings.
        data: The text's digest.
    """
    settings = {name: value for name, value in asdict(config).items() if name not in FREE}
    settings["decay_steps"] = config.decay_steps or config.steps
    plain: dict[str, Any] = json.loads(json.dumps(settings | {"data": data}))
    return plain


def folder_of(config: PretrainConfig) -> Path:
    """Return where a run keeps its checkpoints."""
    if config.out is None:
        raise InvalidArgumentError("checkpoints need a folder: pass --out")
    return config.out / "checkpoints"


def refuse_mixing(config: PretrainConfig) -> None:
    """Raise on every rank when a new run would write over another run's files."""
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
    parts = ["checkpoints"] if latest(out / "checkpoints") is not None else []
    log = out / LOG
    parts += [LOG] if log.is_file() and log.stat().st_size else []
    return ", ".join(parts)


def planned(config: PretrainConfig) -> PretrainConfig:
    """Return the settings with the plan of the rate that a run to be resumed was begun with.

    A run of 20 steps that goes on to 30 keeps its lowest rate for the last ten; `decay_steps`
    plans anew. Nothing is checked here but for that.
    """
    if config.resume != "auto" or config.decay_steps or config.out is None:
        return config
    for folder in finished(folder_of(config)):
        with suppress(DamagedCheckpointError, LookupError, TypeError):
            settings = read_document(folder)["extra"]["settings"]
            decay = settings.get("decay_steps") or settings["steps"]
            return replace(config, decay_steps=int(decay))
    return config


def save_step(
    config: PretrainConfig,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    manager: ProcessGroupManager,
    data: str,
    sizes: LlamaConfig,
) -> Saving:
    """Begin to write the state after `step` steps; training goes on meanwhile.

    Raises:
        NonFiniteError: A weight is infinite or NaN; nothing was written or removed.
        MismatchError: That is so on another rank.
    """
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
    """Raise NonFiniteError where a weight on this rank is infinite or NaN."""
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
    """Restore the newest good checkpoint in `out`; return the steps it holds, 0 if none.

    Raises:
        StateError: the checkpoint belongs to other settings, other text or another program;
            nothing was loaded.
    """
    folder, now = folder_of(config), identity(config, data)

    def check(extra: Mapping[str, Any]) -> None:
        saved = extra.get("settings")
        if not isinstance(saved, dict):
            raise StateError(f"{folder} has a checkpoint that this program did not save")
        older = {"decay_steps": config.decay_steps, "experts": 0, "top_k": now["top_k"]}
        before = {**older, **saved}  # versions before had fewer settings
        if different := [f"{k}: saved {before.get(k)}, now {v}" for k, v in now.items()
                         if k != "decay_steps" and before.get(k) != v]:  # fmt: skip
            raise StateError(
                f"{folder} cannot be resumed with other settings ({'; '.join(different)}); "
                "use the saved ones, or start anew in another folder"
            )

    loaded = load(folder, model, optimizer, manager, check=check)
    return 0 if loaded is None else loaded.step


class Saver:
    """Saves while training goes on, and waits for the last one at the end.

    Args:
        save: Begins to write the state after so many steps.
        every: Steps between checkpoints; 0 saves none.
        start: Steps that were saved before.
    """

    def __init__(self, save: Callable[[int], Saving], every: int, start: int) -> None:
        self._save, self._every, self._saved = save, every, start
        self._saving: Saving | None = None

    def __enter__(self) -> Saver:
        return self

    def after(self, step: int) -> None:
        """Save after `step` steps, if it is time."""
        if self._every and step % self._every == 0:
            self._saving, self._saved = self._save(step), step

    def end(self, step: int) -> None:
        """Save the state after the last step, unless it is saved already."""
        if self._every and step > self._saved:
            self._saving, self._saved = self._save(step), step

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._saving is None:
            return
        if error is None:
            self._saving.wait()
        elif isinstance(error, NonFiniteError | MismatchError) or get_world_size() == 1:
            # On all ranks: none is waited for.
            with suppress(CheckpointError):
                self._saving.wait()  # the last good one may be half-way

"""Loading: find a good checkpoint, check it, then fill the model, whatever layout saved it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..parallel.pg_manager import ProcessGroupManager
from .agreement import CheckpointError, DamagedCheckpointError, Ranks, find_manager
from .format.folders import candidates
from .format.metadata import METADATA, Saved, from_json, unseal
from .format.values import decode, like
from .saving import wait_for_last
from .state.fit import all_names, check_fit, check_programs, plan_model, plan_shards
from .state.generators import find_random, restore_random, seed_anew
from .state.model_tensors import device_of, find_held, find_shards, refresh_shards
from .state.optimizer import make_states
from .state.record import Entry
from .storage import Reader


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of loading.

    Attributes:
        step: The number of steps done.
        extra: The values that were passed to `save` as `extra`.
        folder: The folder of the checkpoint.
    """

    step: int
    extra: dict[str, Any]
    folder: Path


class Program:
    """The program into which a checkpoint is loaded; made without communication."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Any,
        manager: ProcessGroupManager | None,
        ranks: Ranks,
    ) -> None:
        wait_for_last()
        self.optimizer, self.scheduler, self.ranks = optimizer, scheduler, ranks
        self.manager = find_manager(manager)
        found = find_held(model, self.manager)
        self.held = list(found.values())
        self.shards = find_shards(model, found, optimizer, self.manager)


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    manager: ProcessGroupManager | None = None,
    *,
    scheduler: Any = None,
    check: Callable[[dict[str, Any]], None] | None = None,
    fall_back: bool = True,
) -> Loaded | None:
    """Load the newest checkpoint, saved on any layout; all ranks call it.

    All ranks check everything before anything changes: the description, the sizes of the files,
    and the checksum of every block that is read. If a checkpoint is damaged, the one before it is
    loaded, with a warning on every rank. Nothing is unpickled.

    If the layout is the one that saved, each rank's random generators continue from their saved
    state. On another layout they are seeded anew (`seed_ranks`) from a saved seed.

    Args:
        folder: Holds the checkpoints, or is itself the one to load (`step-00000012`, a link to a
            checkpoint, or a copy under another name).
        model: The module that `parallelize` returned, or any other.
        optimizer: Optimizer of the model's parameters, or of their shards; its state is replaced.
        manager: The grid; None is the current one, or one process.
        scheduler: Any object with `load_state_dict`.
        check: Called with `extra` before anything changes; may raise to refuse the checkpoint.
        fall_back: Whether a damaged checkpoint is skipped; False raises instead.

    Returns:
        The step, extra and folder; None if the folder has only unfinished saves and logs.

    Raises:
        CheckpointError: The checkpoint is of another model, or has no optimizer or scheduler for
            the one given; or the folder has no checkpoint, but files of another or unknown kind.
        DamagedCheckpointError: The checkpoint, and every one before it, is incomplete or changed.
    """
    ranks, root = Ranks(), Path(folder).absolute()
    program = ranks.all_or_none(
        f"loading {root} failed", lambda: Program(model, optimizer, scheduler, manager, ranks)
    )
    found = ranks.on_first(lambda: candidates(root))
    damage: dict[str, str] = {}
    for candidate in found if fall_back else found[:1]:
        try:
            loaded = _load_one(candidate, program, check)
        except DamagedCheckpointError as error:
            damage[candidate.name] = str(error)
            continue
        for name, text in damage.items():
            said = f"going back to step {loaded.step}: {name} is damaged: {text}"
            warnings.warn(said, stacklevel=2)
        return loaded
    if damage:
        before = f"; fall_back=True loads {found[1].name}" if len(damage) < len(found) else ""
        raise DamagedCheckpointError("\n".join(damage.values()) + before)
    return None


def _load_one(
    folder: Path, program: Program, check: Callable[[dict[str, Any]], None] | None
) -> Loaded:
    """Load one checkpoint; if this raises, nothing has changed."""
    ranks, what = program.ranks, f"{folder}"
    document = ranks.on_first(lambda: unseal(folder / METADATA))
    extra = decode(document["extra"])
    if check is not None:
        ranks.all_or_none(what, lambda: check(extra))
    saved = from_json(document["entries"])
    names = all_names(program.held, program.manager)
    plan = ranks.all_or_none(what, lambda: Plan(program, document, saved, names))
    plan.read(Reader(folder, saved, document["files"]), what)
    return Loaded(document["step"], extra, folder)


class Plan:
    """The reads from a checkpoint, and the work that follows them."""

    def __init__(
        self,
        program: Program,
        document: dict[str, Any],
        saved: Mapping[str, Saved],
        names: set[str],
        *,
        cast: bool = False,
    ) -> None:
        self._program, self._document = program, document
        check_programs(document, program.optimizer, program.scheduler)
        check_fit(program.held, names, saved, document["ties"])
        self.targets = plan_model(program.held, program.shards, saved, cast=cast)
        plan_shards(program.shards, saved, self.targets)
        self._state: list[tuple[Tensor, dict[str, Any]]] = []
        self._groups: list[dict[str, Any]] = []
        if program.optimizer is not None:
            current, saved_groups = program.optimizer.param_groups, document["groups"]
            self._groups = [
                {key: like(group.get(key), decode(value)) for key, value in values.items()}
                for group, values in zip(current, saved_groups, strict=True)
            ]
            self._state = make_states(
                program.optimizer, program.shards, saved, document["scalars"], self.targets
            )
        self._schedule: dict[str, Any] | None = None
        if program.scheduler is not None:
            self._schedule = like(program.scheduler.state_dict(), decode(document["scheduler"]))
        self._random: dict[str, Tensor] | None = None
        self._random_targets: dict[str, Entry] = {}
        grid = program.manager.grid
        if document.get("grid") == {"dp": grid.dp, "pp": grid.pp, "cp": grid.cp, "tp": grid.tp}:
            self._random = find_random(saved, program.manager, self._random_targets)

    def read(self, reader: Reader, what: str) -> None:
        """Read everything and install it; if this raises, model and optimizer are unchanged."""
        program, ranks = self._program, self._program.ranks
        reads = ranks.all_or_none(what, lambda: reader.plan(self.targets))
        reader.copy(ranks.all_or_none(what, lambda: reader.plan(self._random_targets)))
        ranks.all_or_none(what, self._install_states)
        reader.copy(reads)
        refresh_shards(program.shards)
        if program.optimizer is not None:
            for tensor, state in self._state:
                program.optimizer.state.pop(tensor, None)
                if state:
                    program.optimizer.state[tensor] = state
            for settings, values in zip(program.optimizer.param_groups, self._groups, strict=True):
                settings.update(values)
        if self._random is None and "seed" in self._document:
            seed_anew(self._document["seed"], program.manager)

    def _install_states(self) -> None:
        """Restore the scheduler and the generators first, since they may refuse their state."""
        try:
            if self._schedule is not None:
                self._program.scheduler.load_state_dict(self._schedule)
            if self._random is not None:
                restore_random(self._random, device_of(self._program.held))
        except Exception as error:  # schedulers may raise any kind
            raise CheckpointError(
                "the scheduler or a random generator refuses its saved state: "
                f"{type(error).__name__}: {error}"
            ) from error

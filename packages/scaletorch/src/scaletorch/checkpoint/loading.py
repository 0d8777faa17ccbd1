"""Loading: find a good checkpoint, check it, then fill the model, whatever layout saved it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..dist import all_gather_object
from ..parallel.pg_manager import ProcessGroupManager
from .agreement import CheckpointError, DamagedCheckpointError, Ranks, find_manager
from .format.folders import candidates
from .format.metadata import METADATA, decode, from_json, like, unseal
from .saving import wait_for_last
from .state.model_tensors import (
    ModelTensor,
    device_of,
    find_shards,
    find_tensors,
    is_whole_matrix,
)
from .state.optimizer import make_states
from .state.record import Entry, find_random, restore_random, seed_anew
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
        found = find_tensors(model, self.manager)
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
) -> Loaded | None:
    """Load the newest checkpoint, saved on any layout; all ranks call it.

    All ranks check everything before anything changes: the description, the sizes of the files,
    and the checksum of every block that is read. If a checkpoint is damaged, the one before it is
    loaded, with a warning on every rank, unless `folder` is that checkpoint. Nothing is unpickled.

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
    for candidate in found:
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
        raise DamagedCheckpointError("\n".join(damage.values()))
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
    names = all_names(program.held, program.manager)
    plan = ranks.all_or_none(what, lambda: Plan(program, document, names))
    plan.read(Reader(folder, plan.saved, document["files"]), what)
    return Loaded(document["step"], extra, folder)


def all_names(held: Iterable[ModelTensor], manager: ProcessGroupManager) -> set[str]:
    """Return the names of the whole model's tensors, from the stages of this rank's pipeline."""
    own = sorted({name for each in held for name in each.names})
    return set().union(*all_gather_object(own, manager.pp_group))


class Plan:
    """The reads from a checkpoint that fits a program, and the work that follows them.

    Dtypes of another kind are accepted if the optimizer has master weights, or with `cast`.
    """

    def __init__(
        self, program: Program, document: dict[str, Any], names: set[str], *, cast: bool = False
    ) -> None:
        self._program, self._document = program, document
        self.saved = from_json(document["entries"])
        self.targets: dict[str, Entry] = {}
        self._check_programs()
        self._check_names(names)
        # A parameter shared by stages may have no master although others do; it is rounded anyway.
        self._plan_model(cast=cast or any(shard.is_master for shard, _ in program.shards))
        self._plan_shards()
        self._state: list[tuple[Tensor, dict[str, Any]]] = []
        self._groups: list[dict[str, Any]] = []
        if program.optimizer is not None:
            current, groups = program.optimizer.param_groups, document["groups"]
            self._groups = [
                {key: like(group.get(key), decode(value)) for key, value in values.items()}
                for group, values in zip(current, groups, strict=True)
            ]
            self._state = make_states(
                program.optimizer, program.shards, self.saved, document["scalars"], self.targets
            )
        self._schedule: dict[str, Any] | None = None
        if program.scheduler is not None:
            self._schedule = like(program.scheduler.state_dict(), decode(document["scheduler"]))
        self._random: dict[str, Entry] | None = None
        grid = program.manager.grid
        if document.get("grid") == {"dp": grid.dp, "pp": grid.pp, "cp": grid.cp, "tp": grid.tp}:
            self._random = find_random(self.saved, program.manager)

    def _check_programs(self) -> None:
        """Refuse a checkpoint that does not fit the optimizer and scheduler to restore."""
        document, optimizer = self._document, self._program.optimizer
        for kind, key in (("optimizer", "groups"), ("scheduler", "scheduler")):
            program = getattr(self._program, kind)
            saved, own = document.get("kinds", {}).get(kind), type(program).__name__
            if program is not None and document[key] is None:
                raise CheckpointError(f"it was saved without {kind}: load it without one")
            if program is not None and saved not in (None, own):
                raise CheckpointError(
                    f"its {kind} is of class {saved} and the given one {own}, which cannot "
                    f"continue from its state: pass {saved}, or load without {kind}"
                )
        if optimizer is not None and len(document["groups"]) != len(optimizer.param_groups):
            raise CheckpointError(
                f"its optimizer has {len(document['groups'])} parameter groups and the given one "
                f"{len(optimizer.param_groups)}"
            )

    def _check_names(self, names: set[str]) -> None:
        """Refuse a checkpoint of another model: other names, shapes or ties."""
        wrong, held = [], self._program.held
        ties = {name: tied for tied in self._document["ties"].values() for name in tied}
        known = {name.removeprefix("model.") for name in self.saved if name.startswith("model.")}
        known |= ties.keys()
        if unknown := sorted(known - names):
            wrong.append(f"the model has no {_listed(unknown)}")
        wanted = {name for each in held for name in each.names if each.tensor.numel()}
        if lacking := sorted(wanted - known):
            wrong.append(f"the checkpoint has no {_listed(lacking)}")
        for each in held:
            found = self.saved.get(f"model.{each.name}")
            if found is not None and found.shape != each.shape:
                wrong.append(_difference(each.name, "has shape", found.shape, each.shape))
            for name in each.names:
                tied = ties.get(name, [name])
                if name in known and set(tied) != set(each.names):
                    others = (
                        sorted({*every} - {name}) or "nothing" for every in (tied, each.names)
                    )
                    wrong.append(_difference(name, "is tied to", *others))
        _refuse(wrong)

    def _plan_model(self, *, cast: bool) -> None:
        """Add the entries to load into the model's tensors."""
        wrong = []
        for each in self._program.held:
            if not each.tensor.numel():
                continue
            name, master, dtype = f"model.{each.name}", f"master.{each.name}", each.tensor.dtype
            found = self.saved[name].dtype
            source = master if found != dtype and master in self.saved else name
            if self.saved[source].dtype != dtype and not cast:
                wrong.append(_difference(each.name, "is", found, dtype))
                continue
            # Through `data`, which leaves version counters unchanged. From a changed one a sharded
            # optimizer would conclude that its parameters changed, and round its masters to them.
            own = [*each.rectangles(each.tensor.data)]
            self.targets[name] = Entry(each.shape, dtype, own, source)
        _refuse(wrong)

    def _plan_shards(self) -> None:
        """Add the optimizer's masters and whole matrices; masters may come from parameters."""
        for shard, own in self._program.shards:
            if shard.is_master and shard.tensor.numel():
                name = f"master.{own.name}"
                source = name if name in self.saved else f"model.{own.name}"
                new = Entry(own.shape, shard.tensor.dtype, [], source)
                entry = self.targets.setdefault(name, new)
                entry.rectangles.extend(own.rectangles(shard.tensor, shard.start, shard.stop))
            elif is_whole_matrix(shard, own):
                entry = self.targets[f"model.{own.name}"]
                entry.rectangles.extend(own.rectangles(shard.tensor))

    def read(self, reader: Reader, what: str) -> None:
        """Read everything and install it; if this raises, model and optimizer are unchanged."""
        program, ranks = self._program, self._program.ranks
        reads = ranks.all_or_none(what, lambda: reader.plan(self.targets))
        reader.copy(ranks.all_or_none(what, lambda: reader.plan(self._random or {})))
        ranks.all_or_none(what, self._install_states)
        reader.copy(reads)
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


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown


def _difference(name: str, verb: str, saved: object, own: object) -> str:
    return f"{name} {verb} {saved} in the checkpoint and {own} in the model"


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise CheckpointError("the checkpoint is of another model: " + "; ".join(wrong[:12]))

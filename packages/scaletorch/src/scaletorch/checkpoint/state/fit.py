"""Checks that a checkpoint fits a model, and the choice of a saved entry for each tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from ...dist import all_gather_object
from ...parallel.data_parallel import Shard
from ...parallel.pg_manager import ProcessGroupManager
from ..agreement import CheckpointError
from ..format.metadata import Saved
from ..format.values import kind_of
from .model_tensors import Held, is_whole_matrix
from .record import Entry

Shapes = Mapping[str, Saved]


def all_names(held: Iterable[Held], manager: ProcessGroupManager) -> set[str]:
    """Return the names of the whole model's tensors, from the stages of this rank's pipeline."""
    own = sorted({name for each in held for name in each.names})
    return set().union(*all_gather_object(own, manager.pp_group))


def check_fit(
    held: Collection[Held], names: Collection[str], saved: Shapes, ties: Mapping[str, list[str]]
) -> None:
    """Refuse a checkpoint of another model: other names, shapes or ties."""
    wrong = []
    known = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    known |= {alias for aliases in ties.values() for alias in aliases}
    if unknown := sorted(known - set(names)):
        wrong.append(f"the model has no {_listed(unknown)}")
    groups = {alias: aliases for aliases in ties.values() for alias in aliases}
    wanted = {name for each in held for name in each.names if each.tensor.numel()}
    if lacking := sorted(wanted - known):
        wrong.append(f"the checkpoint has no {_listed(lacking)}")
    for each in held:
        found = saved.get(f"model.{each.name}")
        shape = each.shape if found is None else found.shape
        if shape != each.shape:
            wrong.append(
                f"{each.name} has shape {shape} in the checkpoint and {each.shape} in the model"
            )
        for name in each.names:
            tied = groups.get(name, [name])
            if name in known and set(tied) != set(each.names):
                wrong.append(
                    f"{name} is tied to {_other_names(tied, name)} in the checkpoint and to "
                    f"{_other_names(each.names, name)} in the model"
                )
    if wrong:
        raise CheckpointError("the checkpoint is of another model: " + "; ".join(wrong[:12]))


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown


def _other_names(names: Iterable[str], name: str) -> str:
    return ", ".join(other for other in names if other != name) or "nothing"


def plan_model(
    held: Iterable[Held], shards: Iterable[tuple[Shard, Held]], saved: Shapes, *, cast: bool = False
) -> dict[str, Entry]:
    """Return the entries to load into the model's tensors.

    Other dtypes are accepted if the optimizer has master weights, or with `cast`, for imports.
    """
    # A parameter shared by stages may have no master although others do; it is rounded anyway.
    cast = cast or any(shard.is_master for shard, _ in shards)
    targets: dict[str, Entry] = {}
    wrong = []
    for each in held:
        if not each.tensor.numel():
            continue
        name, master, dtype = f"model.{each.name}", f"master.{each.name}", each.tensor.dtype
        source = master if saved[name].dtype != dtype and master in saved else name
        if saved[source].dtype != dtype and not cast:
            wrong.append(
                f"{each.name} is {saved[name].dtype} in the checkpoint and {dtype} in the model"
            )
            continue
        # Through `data`, which leaves version counters unchanged. From a changed one a sharded
        # optimizer would conclude that its parameters changed, and round its masters to them.
        targets[name] = Entry(each.shape, dtype, [*each.rectangles(each.tensor.data)], source)
    if wrong:
        raise CheckpointError("the checkpoint is of another model: " + "; ".join(wrong[:12]))
    return targets


def plan_shards(
    shards: Iterable[tuple[Shard, Held]], saved: Shapes, targets: dict[str, Entry]
) -> None:
    """Add an optimizer's masters and whole matrices; unsaved masters come from their parameters."""
    for shard, own in shards:
        if shard.is_master and shard.tensor.numel():
            name = f"master.{own.name}"
            source = name if name in saved else f"model.{own.name}"
            entry = targets.setdefault(name, Entry(own.shape, shard.tensor.dtype, [], source))
            entry.rectangles.extend(own.rectangles(shard.tensor, shard.start, shard.stop))
        elif is_whole_matrix(shard, own):
            targets[f"model.{own.name}"].rectangles.extend(own.rectangles(shard.tensor))


def check_programs(
    document: Mapping[str, Any], optimizer: torch.optim.Optimizer | None, scheduler: Any
) -> None:
    """Refuse a checkpoint that does not fit the optimizer and scheduler to restore."""
    programs = {"optimizer": (optimizer, "groups"), "scheduler": (scheduler, "scheduler")}
    for kind, (program, key) in programs.items():
        saved, own = document.get("kinds", {}).get(kind), kind_of(program)
        article = "an" if kind == "optimizer" else "a"
        if program is not None and document[key] is None:
            raise CheckpointError(f"it was saved without {article} {kind}: load it without one")
        if program is not None and saved not in (None, own):
            raise CheckpointError(
                f"its {kind} is {article} {saved} and the given one {own}, which cannot continue "
                f"from its state: pass {saved}, or load without {article} {kind}"
            )
    if optimizer is not None and len(document["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"its optimizer has {len(document['groups'])} parameter groups and the given one "
            f"{len(optimizer.param_groups)}"
        )

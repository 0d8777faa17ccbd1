"""Import of weights from other programs' folders; each rank reads only its own shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..dist import all_gather_object
from ..parallel.pg_manager import ProcessGroupManager
from .agreement import CheckpointError, DamagedCheckpointError, Ranks
from .format.metadata import dtype_name
from .format.safetensors_files import read_header
from .loading import Plan, Program, all_names
from .state.model_tensors import find_ties
from .storage import Reader
from .weights_export import INDEX, WHOLE


class WholeModel(NamedTuple):
    """Names in the whole model, of all ranks together."""

    firsts: dict[str, str]  # each name -> the name that its tensor is saved under
    ties: dict[str, list[str]]  # the name that a tied tensor is saved under -> all its names
    optimizer: torch.optim.Optimizer | None  # if its state is to be loaded too
    groups: list[set[str]]  # for each of the optimizer's groups, the names of its parameters


def import_safetensors(
    model: nn.Module, folder: str | Path, manager: ProcessGroupManager | None = None
) -> None:
    """Load the plain model's weights from the files of `save_pretrained`; all ranks call it.

    Each rank reads only its own shards. Values are cast to the model's dtypes. An optimizer's
    master weights get the values uncast; its other state stays unchanged.

    Args:
        model: The module that `parallelize` returned, or any other.
        folder: Has `model.safetensors`, or several files and their index. Names are the plain
            model's, with one name for a tied parameter.
        manager: The grid; None is the current one, or one process.

    Raises:
        CheckpointError: The weights are another model's; the same on every rank, and nothing was
            loaded.
        DamagedCheckpointError: Files are missing or broken.
    """
    read_folder(Path(folder), model, None, manager, _describe_files, Reader)


def read_folder(
    root: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    manager: ProcessGroupManager | None,
    find: Callable[[Path, WholeModel], dict[str, Any]],
    reader: type[Reader],
) -> None:
    """Load another program's folder, which `find` describes like `metadata.json` on rank 0."""
    ranks, what = Ranks(), f"{root}"
    program = ranks.all_or_none(what, lambda: Program(model, optimizer, None, manager, ranks))
    names = all_names(program.held, program.manager)
    stages = all_gather_object(find_ties(program.held), program.manager.pp_group)
    ties = {name: tied for stage in stages for name, tied in stage.items()}
    firsts = {name: name for name in names}
    firsts |= {alias: first for first, tied in ties.items() for alias in tied}
    whole = WholeModel(firsts, ties, optimizer, _group_names(program))
    document = ranks.on_first(lambda: find(root, whole)) | {"ties": ties}
    plan = ranks.all_or_none(what, lambda: Plan(program, document, names, cast=True))
    plan.read(reader(root, plan.saved, document["files"]), what)


def _group_names(program: Program) -> list[set[str]]:
    """Return the names of each optimizer group's parameters, over all ranks."""
    if program.optimizer is None:
        return []
    names = {id(shard.tensor): own.name for shard, own in program.shards}
    groups = [group["params"] for group in program.optimizer.param_groups]
    own = [sorted({names[id(t)] for t in each if id(t) in names}) for each in groups]
    every = all_gather_object(own, program.ranks.group)
    return [set().union(*ranks) for ranks in zip(*every, strict=True)]


def _describe_files(root: Path, whole: WholeModel) -> dict[str, Any]:
    """Read the headers of all files, and describe each tensor as one chunk."""
    entries: dict[str, Any] = {}
    sizes = {}
    for file, names in _files(root).items():
        header = read_header(root / file)
        sizes[file] = (root / file).stat().st_size
        for name in header if names is None else names:
            if name not in header:
                raise DamagedCheckpointError(f"{root / file} lacks {name}, which {INDEX} lists")
            dtype, shape, start, length = header[name]
            size = torch.Size(shape).numel() * dtype.itemsize
            if length != size or min(start, length) < 0:
                message = f"{root / file} has {length} bytes for {name}, which needs {size}"
                raise DamagedCheckpointError(message)
            chunk = {"at": [0] * len(shape), "shape": shape, "file": file, "offset": start}
            chunk |= {"length": length, "crc32": None}
            entry = {"shape": shape, "dtype": dtype_name(dtype), "chunks": [chunk]}
            first = whole.firsts.get(name, name)
            if f"model.{first}" in entries:
                raise CheckpointError(
                    f"{root} has several of {' and '.join(whole.ties[first])}, which are one "
                    "tensor in the model: untie them, or remove all but one from the files"
                )
            entries[f"model.{first}"] = entry
    return {"entries": entries, "files": sizes, "groups": None}


def _files(root: Path) -> dict[str, list[str] | None]:
    """Return the files, each with the names of the tensors to read; None reads all."""
    if (root / WHOLE).is_file():
        return {WHOLE: None}
    try:
        weights = json.loads((root / INDEX).read_text(encoding="utf-8"))["weight_map"]
        files: dict[str, list[str]] = {}
        for name, file in weights.items():
            if Path(file).name != file:
                raise ValueError(f"{file!r} is not in the folder")
            files.setdefault(file, []).append(name)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{root} has neither {WHOLE} nor {INDEX}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        message = f"{root / INDEX} has no weight_map of names and files: {error!r}"
        raise DamagedCheckpointError(message) from error
    return dict(files)

"""Weights and adapters in the formats of `save_pretrained` of transformers and peft, in and out."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..compose import full_state_dict
from ..dist import all_gather_object, functional
from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager import ProcessGroupManager
from .agreement import CheckpointError, DamagedCheckpointError, Ranks, find_manager
from .format.folders import UNFINISHED
from .format.metadata import Chunk, describe_tensor
from .format.safetensors_files import flush_folder, read_header, write_file
from .loading import Plan, Program, all_names
from .saving import wait_for_last
from .state.model_tensors import ModelTensor, find_tensors, find_ties
from .storage import Reader

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_FILE = 5 * 10**9  # bytes
ADAPTER = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # names in peft's files are those in a PeftModel
_TRAINED = ("modules_to_save", "bias", "trainable_token_indices")  # peft would write these too


def export_safetensors(
    model: nn.Module, folder: str | Path, manager: ProcessGroupManager | None = None
) -> None:
    """Write the plain model's weights for other programs; all ranks call it.

    Writes `model.safetensors`, or several `model-00001-of-0000n.safetensors` of at most 5 GB and an
    index: each pipeline stage writes its own files. Names are the plain model's; a tied parameter
    is written under its first name. Tensors are gathered one by one, so that no rank holds more
    than one whole tensor in addition to its shards.

    Args:
        model: The module that `parallelize` returned, or any other.
        folder: Destination; created if missing.
        manager: The grid; None is the current one, or one process.

    Raises:
        CheckpointError: `folder` has weights already, or a rank could not write; the same on
            every rank.
    """
    ranks, what, root = Ranks(), f"the export to {folder} failed", Path(folder)
    grid, held = ranks.all_or_none(what, lambda: _describe(model, manager))
    ranks.on_first(lambda: _start(root))
    sizes = {name: each.nbytes for name, each in held.items()}
    files = list(_split(all_gather_object(sizes, grid.pp_group)))
    names = [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    named = dict(zip([WHOLE] if len(files) == 1 else names, files, strict=True))
    own = {
        name: [held[tensor] for tensor in file]
        for name, (stage, file) in named.items()
        if stage == grid.pp_rank and (grid.cp_dp_rank == 0 or grid.ep_size > 1)
    }
    writes = grid.cp_dp_rank == 0 and grid.tp_rank == 0
    ranks.all_or_none(what, lambda: _write_all(root, own, writes=writes))
    ranks.on_first(lambda: _finish(root, {name: file for name, (_, file) in named.items()}))


def _describe(
    model: nn.Module, manager: ProcessGroupManager | None
) -> tuple[ProcessGroupManager, dict[str, ModelTensor]]:
    wait_for_last()
    found = find_manager(manager)
    held = find_tensors(model, found).values()
    return found, {each.name: each for each in held if each.first}


def _start(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    found = {path.name for path in root.glob("model*.safetensors*")}
    if names := sorted(name for name in found if not name.endswith(UNFINISHED)):
        raise CheckpointError(f"{root} has weights already ({names[0]}); export to another folder")


def _split(stages: Sequence[Mapping[str, int]]) -> Iterator[tuple[int, dict[str, int]]]:
    """Divide the stages' tensors into files, each with its stage and its tensors' bytes."""
    seen: set[str] = set()
    for stage, sizes in enumerate(stages):
        file: dict[str, int] = {}
        for name in (name for name in sizes if name not in seen):
            if file and sum(file.values()) + sizes[name] > MAX_FILE:
                yield stage, file
                file = {}
            file[name] = sizes[name]
        if file:
            yield stage, file
        seen |= sizes.keys()  # such as a buffer that all stages have


def _write_all(root: Path, files: Mapping[str, list[ModelTensor]], *, writes: bool) -> None:
    """Gather all files' tensors one by one, and write them if this rank `writes`."""
    failed: Exception | None = None  # raised at the end: other ranks still gather with this one
    for name, file in files.items():
        held = sorted(file, key=lambda each: -each.tensor.dtype.itemsize)  # keeps tensors aligned
        slots = [(each.name, each.tensor.dtype, each.shape) for each in held]
        tensors = map(_gather, held)
        try:
            if writes:
                write_file(root / f"{name}{UNFINISHED}", slots, tensors)
        except (OSError, CheckpointError) as error:  # the latter for an unsupported dtype
            failed = error
        for _ in tensors:
            pass
    if failed is not None:
        raise failed


@torch.no_grad()
def _gather(held: ModelTensor) -> Tensor:
    """Return the whole tensor; ranks with shards of it call this for all tensors in one order."""
    tensor = held.tensor.detach()
    if held.cut is not None:
        tensor = held.cut.join(tensor)
    if held.experts is not None:
        sizes = [len(own) for own in held.experts.ranges]
        tensor = functional.gather(tensor, 0, held.experts.group, sizes=sizes)
    return tensor


def _finish(root: Path, files: Mapping[str, Mapping[str, int]]) -> None:
    """Give files (names, and their tensors' bytes) final names, and index several files."""
    for name in files:
        os.replace(root / f"{name}{UNFINISHED}", root / name)
    if len(files) > 1:
        size = sum(sum(file.values()) for file in files.values())
        where = sorted((tensor, name) for name, file in files.items() for tensor in file)
        index = {"metadata": {"total_size": size}, "weight_map": dict(where)}
        unfinished = root / f"{INDEX}{UNFINISHED}"
        unfinished.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        os.replace(unfinished, root / INDEX)
    flush_folder(root)


def export_adapter(
    model: nn.Module,
    folder: str | Path,
    manager: ProcessGroupManager | None = None,
    *,
    adapter: str = "default",
) -> None:
    """Write a LoRA adapter as peft's `save_pretrained` does; all ranks call it.

    Every rank gathers the adapter's tensors, and no others. Rank 0 writes
    `adapter_model.safetensors` and `adapter_config.json`.

    Args:
        model: The module that `parallelize` returned.
        folder: Destination; created if missing.
        manager: The grid; by default the model's.
        adapter: The adapter's name.

    Raises:
        InvalidArgumentError: The model has no such adapter, or it has more than low-rank matrices.
        CheckpointError: `folder` has an adapter already, or rank 0 could not write; the same on
            every rank.
    """
    ranks, root = Ranks(), Path(folder)
    what = f"the export to {folder} failed"
    config = ranks.all_or_none(what, lambda: _config(model, adapter))
    state = full_state_dict(model, manager, only=lambda name: _saved_as(name, adapter) is not None)
    named = {saved: x for name, x in state.items() if (saved := _saved_as(name, adapter))}
    ranks.on_first(lambda: _write_adapter(root, named, config))


def _saved_as(name: str, adapter: str) -> str | None:
    """Return the name of an adapter's tensor in peft's file; None for any other tensor.

    peft's `get_peft_model_state_dict` leaves out names with another adapter's name in them, also
    if that is the name of a module of the model.
    """
    found = re.fullmatch(rf"(.*\blora_\w+)\.{re.escape(adapter)}(\..+)?", name)
    if found is None:
        return None
    where, last = found.groups(default="")
    # DoRA's vector is a module in peft, but a parameter in the names of peft's files.
    last = "" if where.endswith("lora_magnitude_vector") else last
    return _PREFIX + where.removeprefix(_PREFIX) + last  # also if others put the adapter on


def _config(model: nn.Module, adapter: str) -> Any:
    """Return peft's config of an adapter; refuse adapters of more than LoRA's matrices."""
    found = [m for m in model.modules() if isinstance(getattr(m, "peft_config", None), dict)]
    configs: dict[str, Any] = {name: c for m in found for name, c in m.peft_config.items()}  # type: ignore[union-attr,operator]
    config = configs.get(adapter)
    if config is None:
        raise InvalidArgumentError(
            f"{type(model).__name__} has no adapter {adapter!r} of peft; it has "
            f"{', '.join(sorted(configs)) or 'none'}"
        )
    kind = getattr(config.peft_type, "value", config.peft_type)
    trained = [name for name in _TRAINED if getattr(config, name, None) not in (None, [], "none")]
    if kind != "LORA" or trained:
        what = f"has {' and '.join(trained)}" if trained else f"is of kind {kind}"
        raise InvalidArgumentError(
            f"adapter {adapter!r} {what}, and of adapters only the matrices of LoRA are exported: "
            "export the whole model (export_safetensors)"
        )
    return config


def _write_adapter(root: Path, tensors: dict[str, Tensor], config: Any) -> None:
    root.mkdir(parents=True, exist_ok=True)
    if (root / ADAPTER).exists():
        raise CheckpointError(f"{root} has an adapter already; export to another folder")
    ordered = sorted(tensors.items(), key=lambda pair: -pair[1].dtype.itemsize)  # keeps alignment
    slots = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered]
    unfinished = root / f"{ADAPTER}{UNFINISHED}"
    write_file(unfinished, slots, (tensor for _, tensor in ordered))
    saved = copy(config)
    saved.inference_mode = True  # as peft writes it
    saved.save_pretrained(str(root))
    os.replace(unfinished, root / ADAPTER)
    flush_folder(root)


class WholeModel(NamedTuple):
    """Names in the whole model, of all ranks together."""

    firsts: dict[str, str]  # each name -> the name that its tensor is saved under
    ties: dict[str, list[str]]  # the name that a tied tensor is saved under -> all its names
    optimizer: torch.optim.Optimizer | None  # if its state is to be loaded too
    updated: set[str]  # the names of its parameters


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
    ranks, what = Ranks(), str(root)
    program = ranks.all_or_none(what, lambda: Program(model, optimizer, None, manager, ranks))
    names = all_names(program.held, program.manager)
    stages = all_gather_object(find_ties(program.held), program.manager.pp_group)
    ties = {name: tied for stage in stages for name, tied in stage.items()}
    firsts = {name: name for name in names}
    firsts |= {alias: first for first, tied in ties.items() for alias in tied}
    groups = [] if optimizer is None else optimizer.param_groups
    tensors = {id(tensor) for group in groups for tensor in group["params"]}
    updated = sorted(own.name for shard, own in program.shards if id(shard.tensor) in tensors)
    every = set().union(*all_gather_object(updated, ranks.group))
    whole = WholeModel(firsts, ties, optimizer, every)
    document = ranks.on_first(lambda: find(root, whole)) | {"ties": ties}
    plan = ranks.all_or_none(what, lambda: Plan(program, document, names, cast=True))
    plan.read(reader(root, plan.saved, document["files"]), what)


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
            chunk = Chunk((0,) * len(shape), shape, file, start, length, None)
            first = whole.firsts.get(name, name)
            if f"model.{first}" in entries:
                raise CheckpointError(
                    f"{root} has several of {' and '.join(whole.ties[first])}, which are one "
                    "tensor in the model: untie them, or remove all but one from the files"
                )
            entries[f"model.{first}"] = describe_tensor(shape, dtype, [chunk])
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

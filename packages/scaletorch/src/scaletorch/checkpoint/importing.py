"""Weights in: a plain safetensors folder, of which each rank reads its own part."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ..dist import all_gather_object
from ..parallel.data_parallel import Shard
from ..parallel.pg_manager import ProcessGroupManager
from .errors import CheckpointError, DamagedCheckpointError
from .exporting import INDEX, WHOLE
from .format.files import read_header
from .format.metadata import Stored
from .format.reader import CheckpointReader
from .saving import wait_for_last
from .state.entries import Entry
from .state.fitting import all_names, check_fit, plan_masters, plan_model, saved_shapes
from .state.held import Held, find_held, find_shards, find_ties, refresh_shards
from .state.place import Place, control_group, find_place
from .together import all_or_none, on_first_rank, read_together

# Name of a tensor -> dtype, shape, file, first byte, bytes; and the files' sizes.
Found = tuple[dict[str, tuple[torch.dtype, tuple[int, ...], str, int, int]], dict[str, int]]


def import_safetensors(
    model: nn.Module, folder: str | Path, manager: ProcessGroupManager | None = None
) -> None:
    """Load the plain model's weights, as `save_pretrained` leaves them; all ranks call it.

    Each rank reads its own part. Values are cast to the model's dtypes; an optimizer's masters get
    them uncast, and its other state stays as it is.

    Args:
        model: What `parallelize` returned, or any module.
        folder: Has `model.safetensors`, or several files and their index. Names are the plain
            model's; of a tied parameter there is one.
        manager: The grid; None is the current one, or one process.

    Raises:
        CheckpointError: The weights are another model's; the same on every rank, and nothing was
            loaded.
        DamagedCheckpointError: Files are missing or broken.
    """
    group, root, what = control_group(), Path(folder), f"{folder}"
    place, held, shards = all_or_none(what, lambda: _describe(model, manager), group)
    found, sizes = on_first_rank(lambda: _find(root), group)
    names, ties = all_names(held.values(), place), _all_ties(held, place)
    metadata = all_or_none(what, lambda: _as_metadata(found, ties), group)
    targets = all_or_none(what, lambda: _plan(held, shards, metadata, names, ties), group)
    read_together(targets, CheckpointReader(root, metadata, sizes), group, what)
    refresh_shards(shards)


def _describe(
    model: nn.Module, manager: ProcessGroupManager | None
) -> tuple[Place, dict[int, Held], list[Shard]]:
    wait_for_last()
    place = find_place(manager)
    held = find_held(model, place)
    return place, held, find_shards(model, held, None)


def _plan(
    held: dict[int, Held],
    shards: list[Shard],
    metadata: Metadata,
    names: set[str],
    ties: dict[str, list[str]],
) -> dict[str, Entry]:
    saved = saved_shapes(metadata)
    check_fit(held.values(), names, saved, ties)
    targets = plan_model(held.values(), shards, saved, cast=True)
    plan_masters(shards, held, saved, targets)
    return targets


def _all_ties(held: dict[int, Held], place: Place) -> dict[str, list[str]]:
    own = find_ties(held)
    if place.manager is None:
        return own
    stages = all_gather_object(own, place.manager.pp_group)
    return {name: names for stage in stages for name, names in stage.items()}


def _find(root: Path) -> Found:
    """Read the headers of all files.

    Raises:
        DamagedCheckpointError: There are none, or they are not as they should be.
    """
    found, sizes = {}, {}
    for file, names in _files(root).items():
        header = read_header(root / file)
        sizes[file] = (root / file).stat().st_size
        for name in header if names is None else names:
            if name not in header:
                raise DamagedCheckpointError(f"{root / INDEX} has {name} in {file}, which lacks it")
            dtype, shape, start, length = header[name]
            if length != torch.Size(shape).numel() * dtype.itemsize or min(start, length) < 0:
                raise DamagedCheckpointError(f"{root / file} has {length} bytes for {name}")
            found[name] = dtype, shape, file, start, length
    return found, sizes


def _files(root: Path) -> dict[str, list[str] | None]:
    """Return the files, each with the tensors to take from it; None is all."""
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


def _as_metadata(
    found: dict[str, tuple[torch.dtype, tuple[int, ...], str, int, int]],
    ties: dict[str, list[str]],
) -> Metadata:
    """Describe each tensor as one chunk, by the name that the model saves it by."""
    for first, names in ties.items():
        if len(there := [name for name in names if name in found]) > 1:
            raise CheckpointError(
                f"it has {' and '.join(there)}, which are one tensor in the model ({first}): "
                "untie them, or leave one out"
            )
    firsts = {alias: first for first, names in ties.items() for alias in names}
    entries, stored = {}, {}
    for name, (dtype, shape, file, start, length) in found.items():
        entry, zeros = f"model.{firsts.get(name, name)}", torch.Size([0] * len(shape))
        chunk = ChunkStorageMetadata(zeros, torch.Size(shape))
        size = torch.Size(shape)
        entries[entry] = TensorStorageMetadata(TensorProperties(dtype), size, [chunk])
        stored[MetadataIndex(entry, zeros)] = Stored(file, start, length, None)
    return Metadata(dict(entries), storage_data=stored)

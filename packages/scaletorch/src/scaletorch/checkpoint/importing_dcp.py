"""Checkpoints of torch.distributed.checkpoint in: FSDP2's and DTensor's, into any layout."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from ..parallel.pg_manager import ProcessGroupManager
from .errors import CheckpointError, DamagedCheckpointError
from .format.description import check_entries
from .format.files import open_regular, regular_size
from .format.metadata import Stored
from .format.reader import CheckpointReader
from .format.values import canonical, dtype_name, encode
from .importing import Whole, read_folder
from .state.optimizer import KNOBS

_CLASSES = {  # of which torch makes a description, beside dtypes
    "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "StorageMeta",
    "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "_StorageInfo", "Size",
    "_get_layout", "OrderedDict", "PosixPath",
}  # fmt: skip
_MODULES = {
    dcp.__name__, "torch.distributed.checkpoint.filesystem", "torch", "torch.serialization",
    "collections", "pathlib", "pathlib._local",
}  # fmt: skip


def import_dcp(
    model: nn.Module,
    folder: str | Path,
    optimizer: torch.optim.Optimizer | None = None,
    manager: ProcessGroupManager | None = None,
    *,
    prefix: str | None = None,
) -> None:
    """Load what `torch.distributed.checkpoint.save` wrote of FSDP2 or DTensors; all ranks call it.

    Each rank reads its own part, on any layout. Values are cast to the model's dtypes; masters get
    them uncast. The optimizer gets its state and its groups' hyperparameters by parameters' names,
    nested or flattened, as `get_state_dict` of torch gives them; all else stays as it is.

    `.metadata` is a pickle, read with the classes that torch writes there and no others, and values
    are read as by `torch.load(weights_only=True)`: nothing in the folder is run.

    Args:
        model: What `parallelize` returned, or any module.
        folder: Has `.metadata` and `*.distcp`.
        optimizer: One of the model's parameters, or of their shards; its state is replaced.
        manager: The grid; None is the current one, or one process.
        prefix: Stands before the model's names there, as `app.model.`; None finds it.

    Raises:
        CheckpointError: It is of another model or optimizer; the same on every rank, and nothing
            was loaded.
        DamagedCheckpointError: Files are missing or broken.
    """
    read_folder(Path(folder), model, optimizer, manager,
                lambda root, whole: _describe(_Saved(root), whole, prefix), _Reader)  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module in _MODULES and name in _CLASSES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, as no description does")


class _Saved:
    """What a folder holds, described as in `metadata.json`; a value that is no tensor has no dtype.

    Args:
        root: The folder.

    Raises:
        DamagedCheckpointError: Its description cannot be read.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            with open_regular(root / ".metadata") as file:
                found = _Unpickler(file).load()
            stored = {(key.fqn, key.offset): info for key, info in found.storage_data.items()}
            whole = dcp.ChunkStorageMetadata(None, torch.Size())  # type: ignore[arg-type]
            self.entries = {
                name: {
                    "shape": list(getattr(entry, "size", ())),
                    "dtype": dtype_name(entry.properties.dtype) if hasattr(entry, "size") else "",
                    "chunks": [
                        {"at": list(chunk.offsets or ()), "shape": list(chunk.sizes)}
                        | _place(stored[name, chunk.offsets])
                        for chunk in getattr(entry, "chunks", [whole])
                    ],
                }
                for name, entry in found.state_dict_metadata.items()
            }
        except Exception as error:  # of whatever kind a broken pickle raises
            raise DamagedCheckpointError(
                f"{root / '.metadata'} cannot be read, pass the folder of one finished checkpoint: "
                f"{type(error).__name__}: {error}"
            ) from error

    def owners(self, mark: str, names: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """Return a key of the optimizer -> the parameter, or the number, and the item in it."""
        found = {}
        for key in self.entries:
            for match in re.finditer(rf"(?:^|\.){mark}\.", key):
                name, _, item = key[match.end() :].rpartition(".")
                if name in names or name.isdecimal():
                    found[key] = names.get(name, name), item
        return found

    def read(self, entry: Mapping[str, Any]) -> list[Any]:
        """Return an entry's chunks."""
        places = [[chunk[field] for field in Stored._fields] for chunk in entry["chunks"]]
        return [_read(self.root, Stored(*place)) for place in places]


def _place(info: Any) -> dict[str, Any]:
    if Path(info.relative_path).name != info.relative_path or info.transform_descriptors:
        raise ValueError(f"{info} is in another folder, or written by an extension")
    return Stored(info.relative_path, info.offset, info.length, None)._asdict()


def _read(root: Path, stored: Stored) -> Any:
    """Return a chunk or a value; its checksums are compared, which torch does not.

    Raises:
        DamagedCheckpointError: It is not what was written.
    """
    try:
        with open_regular(root / stored.file) as file:
            file.seek(stored.offset)
            data = io.BytesIO(file.read(stored.length))
        if zipfile.ZipFile(data).testzip() is not None:
            raise ValueError("its checksum is another")
        data.seek(0)
        return torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # of whatever kind broken files raise
        message = f"{root / stored.file} cannot be read at byte {stored.offset}: {error}"
        raise DamagedCheckpointError(message) from error


class _Reader(CheckpointReader):
    """Reads the files, checked before anything is copied."""

    _last: tuple[Stored | None, Tensor] = None, torch.empty(0)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        for item in plan.items:
            self._chunk(item, self._entry(item))
        return plan

    def _chunk(self, item: ReadItem, entry: dcp.TensorStorageMetadata) -> Tensor:
        stored = self._metadata.storage_data[item.storage_index]
        if stored != self._last[0]:  # one chunk may have several of this rank's parts
            self._last = stored, _read(self._folder, stored)
        if self._last[1].shape != entry.chunks[item.storage_index.index or 0].sizes:
            raise DamagedCheckpointError(
                f"{self._folder / stored.file} has a tensor of shape {tuple(self._last[1].shape)} "
                f"at byte {stored.offset}, which is not that of {item.storage_index.fqn}"
            )
        return self._last[1]


def _describe(saved: _Saved, whole: Whole, prefix: str | None) -> dict[str, Any]:
    """Return a description like a checkpoint's own, by the model's names."""
    prefix = _find_prefix(saved, whole.firsts) if prefix is None else prefix
    states = saved.owners("state", whole.firsts)
    entries: dict[str, Any] = {}
    for key in sorted({key for key in saved.entries if key.startswith(prefix)} - set(states)):
        entry, name = saved.entries[key], key.removeprefix(prefix)
        first = f"model.{whole.firsts.get(name, name)}"
        if first in entries and not all(
            map(torch.equal, saved.read(entries[first]), saved.read(entry))
        ):
            raise CheckpointError(
                f"{saved.root} has other values for {key} than for another name of it, and in the "
                "model they are one tensor"
            )
        if name in whole.firsts or (entry["shape"] and "float" in entry["dtype"]):
            entries[first] = entry
    document: dict[str, Any] = {"groups": None, "scalars": {}, "entries": entries}
    if whole.optimizer is not None:
        _add_state(saved, whole, states, document)
        document["groups"] = _groups(saved, whole, whole.optimizer)
    check_entries(entries, saved.root)
    files = {chunk["file"] for entry in entries.values() for chunk in entry["chunks"]}
    return document | {"files": {file: regular_size(saved.root / file) for file in files}}


def _find_prefix(saved: _Saved, firsts: Mapping[str, str]) -> str:
    found: dict[str, set[str]] = defaultdict(set)
    for key in saved.entries:
        for at in [0, *(match.end() for match in re.finditer(r"\.", key))]:
            if key[at:] in firsts:
                found[key[:at]].add(firsts[key[at:]])
    most = max(map(len, found.values()), default=0)
    best = sorted(prefix for prefix, names in found.items() if len(names) == most)
    if len(best) != 1:
        what = (
            f"this model more than once: pass prefix=, one of {best}" if best else "another model"
        )
        raise CheckpointError(f"{saved.root} has {what}")
    return best[0]


def _add_state(
    saved: _Saved, whole: Whole, states: Mapping[str, tuple[str, str]], document: dict[str, Any]
) -> None:
    kept: dict[str, set[str]] = defaultdict(set)
    for key, (name, item) in states.items():
        kept[name].add(item)
        if saved.entries[key]["shape"]:
            document["entries"][f"optimizer.{name}.{item}"] = saved.entries[key]
        else:
            value = saved.read(saved.entries[key])[0]
            document["scalars"][f"optimizer.{name}.{item}"] = encode(value, key)
    every = set().union(*kept.values())
    for name in sorted(set().union(*whole.groups)):
        if lacking := every - kept.get(name, set()):
            raise CheckpointError(
                f"{saved.root} has no {', '.join(sorted(lacking))} of the optimizer for {name}, "
                f"but for {', '.join(list(kept)[:4])}: save what get_state_dict(model, optimizer) "
                "of torch.distributed.checkpoint.state_dict returns, or import without optimizer"
            )


def _groups(
    saved: _Saved, whole: Whole, optimizer: torch.optim.Optimizer
) -> list[dict[str, Any]] | None:
    """Return the hyperparameters of the optimizer's groups; None if none are saved.

    Raises:
        CheckpointError: A group has parameters of several there, or the optimizer is another one.
    """
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, (name, item) in saved.owners("param_groups", whole.firsts).items():
        if item == "params" or item not in KNOBS:
            groups[name][item] = saved.read(saved.entries[key])[0]
    values: dict[str, Any] = {}
    for name, group in groups.items():
        members = [whole.firsts.get(member, member) for member in group.pop("params", [name])]
        values |= dict.fromkeys(members, encode(group, f"group {name}"))
    result = []
    for own, names in zip(optimizer.param_groups, whole.groups, strict=True):
        found = {canonical(values[name]): values[name] for name in sorted(names & values.keys())}
        unknown = set().union(*found.values()) - set(own) - {"initial_lr"}
        if groups and (len(found) != bool(names) or unknown):
            raise CheckpointError(
                f"the optimizer in {saved.root} is another one, or has other groups: one of the "
                f"{type(optimizer).__name__} given is {' and '.join(found) or 'not'} there"
            )
        result += [*found.values()] or [{}]
    return result if groups else None

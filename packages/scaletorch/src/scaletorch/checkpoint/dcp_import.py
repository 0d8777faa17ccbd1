"""Import of torch.distributed.checkpoint's files (FSDP2's and DTensor's) into any layout."""

from __future__ import annotations

import io
import pickle
import re
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from enum import EnumMeta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import MetadataIndex

from ..parallel.pg_manager import ProcessGroupManager
from .agreement import CheckpointError, DamagedCheckpointError
from .format.metadata import Chunk, check_whole, describe_tensor, encode
from .state.optimizer import KNOBS
from .storage import Read, Reader
from .weights import WholeModel, read_folder

_CLASSES = {  # that torch pickles in a `.metadata`, in addition to dtypes
    "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "StorageMeta",
    "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "_StorageInfo", "Size",
    "_get_layout", "OrderedDict", "PosixPath",
}  # fmt: skip
_MODULES = {
    metadata.__name__, filesystem.__name__, "torch", "torch.serialization", "collections",
    "pathlib", "pathlib._local",
}  # fmt: skip
_OPTIMIZER = re.compile(r"(?:^|\.)(state|param_groups)\.")
Entries = dict[str, dict[str, Any]]  # name -> entry, as in `metadata.json`


def import_dcp(
    model: nn.Module,
    folder: str | Path,
    optimizer: torch.optim.Optimizer | None = None,
    manager: ProcessGroupManager | None = None,
) -> None:
    """Load a folder of `torch.distributed.checkpoint.save` with FSDP2 or DTensor state.

    All ranks call it, on any layout, and each reads only its own shards. Values are cast to the
    model's dtypes; master weights get them uncast. The optimizer's state is found by parameter
    names, nested or flattened, as torch's `get_state_dict` returns it. All else stays as it is,
    also the hyperparameters of the optimizer's groups; rank 0 warns of other learning rates.

    `.metadata` is a pickle; only the classes that torch writes there are allowed. Values are read
    with `torch.load(weights_only=True)`. So no code in the folder runs.

    Args:
        model: The module that `parallelize` returned, or any other.
        folder: Has `.metadata` and `*.distcp`, and the model once, under any prefix.
        optimizer: Optimizer of the model's parameters, or of their shards; its state is replaced.
        manager: The grid; None is the current one, or one process.

    Raises:
        CheckpointError: It is of another model or optimizer; the same on every rank, and nothing
            was loaded.
        DamagedCheckpointError: Files are missing or broken.
    """
    read_folder(Path(folder), model, optimizer, manager, _describe, _Reader)


def _describe(root: Path, whole: WholeModel) -> dict[str, Any]:
    """Return a description like `metadata.json`, under the model's names."""
    saved = _entries(root)
    prefix = _find_prefix(root, saved, whole.firsts)
    entries: Entries = {}
    for key in sorted(key for key in saved if key.startswith(prefix)):
        entry, name = saved[key], key.removeprefix(prefix)
        weight = entry["shape"] and "float" in entry["dtype"] and not _OPTIMIZER.search(key)
        first = f"model.{whole.firsts.get(name, name)}"
        known = entries.get(first, entry)
        both = ([_read(root, **chunk) for chunk in each["chunks"]] for each in (known, entry))
        if known is not entry and not all(map(torch.equal, *both)):
            raise CheckpointError(
                f"{root} has different values for {key} and another name of it, and in the model "
                "they are one tensor"
            )
        if name in whole.firsts or weight:
            entries[first] = entry
    document: dict[str, Any] = {"entries": entries, "scalars": {}, "groups": None, "files": {}}
    optimizer, states = whole.optimizer, _by_parameter(saved, "state", whole.firsts)
    if optimizer is not None and states:
        _add_state(root, states, whole, document)
        document["groups"] = [{} for _ in optimizer.param_groups]
        every = _by_parameter(saved, "param_groups", whole.firsts).items()
        groups = [group for name, group in every if name in whole.updated or name.isdecimal()]
        _compare_groups(root, groups, optimizer)
    check_whole(root, entries)
    return document


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module in _MODULES and name in _CLASSES):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # pickles enum members until Python 3.11.4
            return _member
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, as torch never does")


def _member(kind: Any, name: Any) -> Any:
    if isinstance(kind, EnumMeta):
        return kind[name]
    raise pickle.UnpicklingError(f"it reads {name} of {kind}, as torch never does")


def _entries(root: Path) -> Entries:
    """Return the entries of a folder; values that are not tensors have the dtype ''."""
    try:
        with (root / ".metadata").open("rb") as file:
            found = _Unpickler(file).load()
        entries: Entries = {}
        for index, info in found.storage_data.items():
            chunk = Chunk((), (), info.relative_path, info.offset, info.length, None)
            entries[index.fqn] = {"shape": [], "dtype": "", "chunks": [chunk._asdict()]}
        for name, entry in found.state_dict_metadata.items():
            if hasattr(entry, "chunks"):
                chunks = []
                for chunk in entry.chunks:
                    info = found.storage_data[MetadataIndex(name, chunk.offsets)]
                    where = info.relative_path, info.offset, info.length
                    chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), *where, None))
                entries[name] = describe_tensor(entry.size, entry.properties.dtype, chunks)
        return entries
    except Exception as error:  # a broken pickle may raise any kind
        raise DamagedCheckpointError(
            f"{root / '.metadata'} cannot be read, pass the folder of one finished checkpoint: "
            f"{type(error).__name__}: {error}"
        ) from error


def _read(root: Path, file: str, offset: int, length: int, **_: Any) -> Any:
    """Return a chunk or a value, after checking its checksums, which torch does not do."""
    try:
        if Path(file).name != file:
            raise ValueError("it is outside the folder")
        with (root / file).open("rb") as opened:
            opened.seek(offset)
            data = io.BytesIO(opened.read(length))
        if zipfile.ZipFile(data).testzip() is not None:
            raise ValueError("its checksum does not match")
        data.seek(0)
        return torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # broken files may raise any kind
        message = f"{root / file} cannot be read at byte {offset}: {error}"
        raise DamagedCheckpointError(message) from error


class _Reader(Reader):
    """Reads the files; loads each chunk once before any copy, to check it."""

    def check(self, read: Read) -> None:
        place = read.chunk.file, read.chunk.offset
        if place not in self._checked:
            self._checked.add(place)
            self.tensor(read)

    def tensor(self, read: Read) -> Tensor:
        chunk = read.chunk
        found: Tensor = _read(self.folder, chunk.file, chunk.offset, chunk.length)
        if tuple(found.shape) != chunk.shape:
            raise DamagedCheckpointError(
                f"{self.folder / chunk.file} has a tensor of shape {tuple(found.shape)} at byte "
                f"{chunk.offset}, which is not that of {read.name}"
            )
        return found


def _find_prefix(root: Path, saved: Entries, firsts: Mapping[str, str]) -> str:
    # Every start of a name within a key is a candidate; the prefix with most names wins.
    found: dict[str, set[str]] = defaultdict(set)
    for key in saved:
        for match in re.finditer(r"^|\.", key):
            if (name := key[match.end() :]) in firsts:
                found[key[: match.end()]].add(firsts[name])
    most = max(map(len, found.values()), default=0)
    best = sorted(prefix for prefix, names in found.items() if len(names) == most)
    if len(best) != 1:
        what = f"has this model more than once, as {best}: save it once"
        raise CheckpointError(f"{root} {what if best else 'has a checkpoint of another model'}")
    return best[0]


def _by_parameter(saved: Entries, mark: str, names: Mapping[str, str]) -> dict[str, Entries]:
    """Map each parameter's name, or number, to its optimizer entries of a kind (`mark`)."""
    found: dict[str, Entries] = defaultdict(dict)
    for key, entry in saved.items():
        for match in _OPTIMIZER.finditer(key):
            name, _, item = key[match.end() :].rpartition(".")
            if match[1] == mark and (name in names or name.isdecimal()):
                found[names.get(name, name)][item] = entry
    return found


def _compare_groups(root: Path, groups: list[Entries], optimizer: torch.optim.Optimizer) -> None:
    """Refuse groups of another optimizer; warn of learning rates that no group of this one has."""
    known = set().union(KNOBS, ["initial_lr"], *optimizer.param_groups)
    if unknown := sorted(set().union(*groups) - known):
        raise CheckpointError(
            f"{root} was saved with another optimizer: its groups have {', '.join(unknown)}, and "
            f"those of the given {type(optimizer).__name__} have not"
        )
    rates = {float(_read(root, **each["lr"]["chunks"][0])) for each in groups if "lr" in each}
    own = {float(group["lr"]) for group in optimizer.param_groups if "lr" in group}
    if not rates <= own:
        warnings.warn(
            f"{root} was saved with learning rates {sorted(rates)}; they are not restored, and the "
            f"optimizer keeps {sorted(own)}: set the `lr` of its groups",
            stacklevel=2,
        )


def _add_state(
    root: Path, states: Mapping[str, Entries], whole: WholeModel, document: dict[str, Any]
) -> None:
    for name, items in states.items():
        for item, entry in items.items():
            key = f"optimizer.{name}.{item}"
            if entry["shape"]:
                document["entries"][key] = entry
            else:
                document["scalars"][key] = encode(_read(root, **entry["chunks"][0]), key)
    every = set().union(*states.values())
    for name in sorted(whole.updated):
        if lacking := every - set(states.get(name, ())):
            raise CheckpointError(
                f"{root} has no {', '.join(sorted(lacking))} of the optimizer for {name}, but for "
                f"{', '.join(list(states)[:4])}: save what get_state_dict(model, optimizer) of "
                "torch.distributed.checkpoint.state_dict returns, or import without optimizer"
            )

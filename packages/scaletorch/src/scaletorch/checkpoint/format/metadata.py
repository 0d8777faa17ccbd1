"""The JSON file that describes a checkpoint: the chunks of every tensor, and plain values."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dist.errors import InvalidArgumentError
from ..agreement import DamagedCheckpointError

FORMAT, VERSION = "scaletorch-checkpoint", 1
METADATA = "metadata.json"
_PLAIN = (str, int, float, bool, type(None))
_MARKS = {"tuple", "pairs", "tensor"}


class Chunk(NamedTuple):
    """A rectangle of a saved tensor."""

    at: tuple[int, ...]  # its first index in the whole tensor, per dim
    shape: tuple[int, ...]  # its sizes
    file: str  # name of the file, in the checkpoint's folder
    offset: int  # its first byte in the file
    length: int  # number of bytes
    crc32: list[int] | None  # checksum of each block of these bytes; None if none was saved


class SavedTensor(NamedTuple):
    """A saved tensor: shape and dtype of the whole, and the chunks that it is stored in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[Chunk]


def describe_tensor(
    shape: Sequence[int], dtype: torch.dtype, chunks: Iterable[Chunk]
) -> dict[str, Any]:
    """Return the description of a tensor as plain values for JSON."""
    described = [chunk._asdict() for chunk in chunks]
    return {"shape": list(shape), "dtype": dtype_name(dtype), "chunks": described}


def from_json(entries: Mapping[str, Any]) -> dict[str, SavedTensor]:
    """Return the tensors that `describe_tensor` described, by name."""
    found = {}
    for name, entry in entries.items():
        tuples = ({key: tuple(each[key]) for key in ("at", "shape")} for each in entry["chunks"])
        chunks = [Chunk(**each | own) for each, own in zip(entry["chunks"], tuples, strict=True)]
        found[name] = SavedTensor(tuple(entry["shape"]), named_dtype(entry["dtype"]), chunks)
    return found


def check_whole(folder: Path, entries: Mapping[str, Any]) -> None:
    """Refuse descriptions of tensors whose chunks in `folder` do not cover them exactly."""
    for name, entry in from_json(entries).items():
        filled = [chunk for chunk in entry.chunks if prod(chunk.shape)]
        inside = all(
            at >= 0 and at + size <= whole
            for chunk in filled
            for at, size, whole in zip(chunk.at, chunk.shape, entry.shape, strict=True)
        )
        held, places = sum(prod(chunk.shape) for chunk in filled), {chunk.at for chunk in filled}
        if not inside or held != prod(entry.shape) or len(places) != len(filled):
            raise DamagedCheckpointError(
                f"{folder}: the {len(entry.chunks)} chunks of {name} do not cover {entry.shape}"
            )


def seal(document: dict[str, Any]) -> str:
    """Return a description as JSON text, with format, version and a digest of its content."""
    marked = {"format": FORMAT, "version": VERSION, **document}
    digest = sha256(canonical(marked).encode()).hexdigest()
    # Not indented: for indents `json` falls back on its slow encoder in Python.
    return json.dumps(marked | {"digest": digest}, separators=(",", ":"))


def unseal(path: Path) -> dict[str, Any]:
    """Read a description, and check its format, version and digest."""
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        digest = document.pop("digest", None)
        found = sha256(canonical(document).encode()).hexdigest()
    except (OSError, ValueError, RecursionError, AttributeError, TypeError) as error:
        raise DamagedCheckpointError(f"{path} cannot be read as JSON: {error!r}") from error
    if document.get("format") != FORMAT or digest != found:
        raise DamagedCheckpointError(
            f"{path} has changed, or is none of this library: wrong digest"
        )
    if (version := document.get("version")) != VERSION:
        raise DamagedCheckpointError(f"{path} has version {version}; this library reads {VERSION}")
    return document


def encode(value: Any, where: str) -> Any:
    """Convert a value to JSON types, with marks for tuples, other keys and 0-d tensors."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list):
        return [encode(each, where) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(each, where) for each in value]}
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value) and not _MARKS & set(value):
            return {key: encode(each, f"{where}[{key!r}]") for key, each in value.items()}
        pairs = [[encode(key, where), encode(each, where)] for key, each in value.items()]
        return {"pairs": pairs}
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex():
        return {"tensor": value.item(), "dtype": dtype_name(value.dtype)}
    kind = f"{value.ndim}-d tensor" if isinstance(value, Tensor) else type(value).__name__
    raise InvalidArgumentError(
        f"{where} contains a {kind}, and a checkpoint stores only numbers, strings, None, 0-d "
        "tensors, and lists, tuples and mappings of these"
    )


def decode(value: Any) -> Any:
    """Convert the result of `encode` back to the value."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(decode(each) for each in value["tuple"])
    if "pairs" in value:
        return {decode(key): decode(each) for key, each in value["pairs"]}
    if "tensor" in value:
        return torch.tensor(value["tensor"], dtype=named_dtype(value["dtype"]))
    return {key: decode(each) for key, each in value.items()}


def like(current: Any, value: Any) -> Any:
    """Return a decoded value with the container types and devices of the value it replaces."""
    if isinstance(current, Counter):
        return Counter(value)
    if isinstance(current, dict) and isinstance(value, dict):
        return {key: like(current.get(key), each) for key, each in value.items()}
    rows = isinstance(current, list | tuple) and isinstance(value, list | tuple)
    if rows and len(current) == len(value):
        return type(value)(like(*pair) for pair in zip(current, value, strict=True))
    if isinstance(current, int | float) and isinstance(value, Tensor):
        return value.item()
    if isinstance(current, Tensor) and isinstance(value, int | float):
        return torch.full_like(current, value)
    if isinstance(current, Tensor) and isinstance(value, Tensor):
        return value.to(current.device)
    return value


def canonical(value: Any) -> str:
    """Return a value's canonical JSON text, the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def named_dtype(name: str) -> torch.dtype:
    """Return the dtype with a name such as `float32`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype")
    return dtype

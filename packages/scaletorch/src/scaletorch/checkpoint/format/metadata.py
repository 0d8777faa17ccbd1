"""The JSON file that describes a checkpoint, with the place of every chunk of every tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..agreement import CheckpointError, DamagedCheckpointError
from .values import canonical, dtype_name, named_dtype

FORMAT, VERSION = "scaletorch-checkpoint", 1
METADATA = "metadata.json"
_KEYS = {
    "step", "grid", "seed", "groups", "scheduler", "extra", "ties", "scalars", "files", "entries",
}  # fmt: skip


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


def to_json(saved: Mapping[str, SavedTensor]) -> dict[str, Any]:
    """Return the description of a checkpoint's tensors as plain values for JSON."""
    return {
        name: {
            "shape": list(entry.shape),
            "dtype": dtype_name(entry.dtype),
            "chunks": [chunk._asdict() for chunk in entry.chunks],
        }
        for name, entry in sorted(saved.items())
    }


def from_json(entries: Mapping[str, Any]) -> dict[str, SavedTensor]:
    """Return the tensors that `to_json` described."""
    found = {}
    for name, entry in entries.items():
        tuples = ({key: tuple(each[key]) for key in ("at", "shape")} for each in entry["chunks"])
        chunks = [Chunk(**each | own) for each, own in zip(entry["chunks"], tuples, strict=True)]
        found[name] = SavedTensor(tuple(entry["shape"]), named_dtype(entry["dtype"]), chunks)
    return found


def require_whole(saved: Mapping[str, SavedTensor]) -> None:
    """Refuse tensors whose chunks do not cover them exactly."""
    for name, entry in saved.items():
        filled = [chunk for chunk in entry.chunks if prod(chunk.shape)]
        inside = all(
            at >= 0 and at + size <= whole
            for chunk in filled
            for at, size, whole in zip(chunk.at, chunk.shape, entry.shape, strict=True)
        )
        held, places = sum(prod(chunk.shape) for chunk in filled), {chunk.at for chunk in filled}
        if not inside or held != prod(entry.shape) or len(places) != len(filled):
            raise CheckpointError(
                f"the {len(entry.chunks)} chunks of {name} do not cover its shape {entry.shape}"
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
        message = f"{path} cannot be read as JSON: {type(error).__name__}: {error}"
        raise DamagedCheckpointError(message) from error
    if document.get("format") != FORMAT:
        raise DamagedCheckpointError(f"{path} does not describe a checkpoint of this library")
    if digest != found:
        raise DamagedCheckpointError(f"{path} has changed: its digest does not match")
    if (version := document.get("version")) != VERSION:
        raise DamagedCheckpointError(
            f"{path} has version {version}, and this library reads version {VERSION}"
        )
    if lacking := sorted(_KEYS - set(document)):
        raise DamagedCheckpointError(f"{path} lacks {', '.join(lacking)}")
    return document

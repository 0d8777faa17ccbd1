"""The one file that describes a checkpoint: torch.distributed.checkpoint's metadata as JSON."""

from __future__ import annotations

import json
import os
import re
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ..errors import DamagedCheckpointError
from .files import open_regular
from .values import canonical, dtype_name, named_dtype

FORMAT, VERSION = "scaletorch-checkpoint", 1
METADATA = "metadata.json"
_KEYS = {
    "step", "grid", "seed", "groups", "scheduler", "extra", "ties", "scalars", "files", "entries",
}  # fmt: skip
_BEGINNING = re.compile(rb'\{\s{0,8}"format"\s{0,4}:\s{0,4}"scaletorch-checkpoint"')  # no blanks
_LARGEST = 2**29  # bytes; some millions of chunks
FILE_NAME = re.compile(r"rank-\d{5,}\.safetensors")


class Stored(NamedTuple):
    """Where a chunk's bytes are.

    Attributes:
        file: Name of the file, in the checkpoint's folder.
        offset: Its first byte.
        length: Number of bytes.
        crc32: Checksum of every block of them; None if none was saved.
    """

    file: str
    offset: int
    length: int
    crc32: list[int] | None


def to_json(metadata: Metadata) -> dict[str, Any]:
    """Return the entries of a checkpoint as JSON."""
    entries = {}
    for name, entry in sorted(metadata.state_dict_metadata.items()):
        chunks = []
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"{name} is no tensor")
        for chunk in entry.chunks:
            stored = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            place = {"at": list(chunk.offsets), "shape": list(chunk.sizes)}
            chunks.append(place | stored._asdict())
        dtype = dtype_name(entry.properties.dtype)
        entries[name] = {"shape": list(entry.size), "dtype": dtype, "chunks": chunks}
    return entries


def from_json(entries: dict[str, Any]) -> Metadata:
    """Return torch.distributed.checkpoint's metadata of entries that `check_document` has seen."""
    found: dict[str, Any] = {}
    stored: dict[MetadataIndex, Stored] = {}
    for name, entry in entries.items():
        chunks = []
        for each in entry["chunks"]:
            chunk = ChunkStorageMetadata(torch.Size(each["at"]), torch.Size(each["shape"]))
            place = Stored(each["file"], each["offset"], each["length"], each["crc32"])
            stored[MetadataIndex(name, chunk.offsets)] = place
            chunks.append(chunk)
        properties = TensorProperties(named_dtype(entry["dtype"]))
        found[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
    return Metadata(found, storage_data=stored)


def seal(document: dict[str, Any]) -> str:
    """Return the text of a description, marked as ours and with a digest of itself."""
    marked = {"format": FORMAT, "version": VERSION, **document}
    digest = sha256(canonical(marked).encode()).hexdigest()
    # Not indented: Python's own encoder, which is slow, would write it then.
    return json.dumps(marked | {"digest": digest}, separators=(",", ":"))


def unseal(path: Path) -> dict[str, Any]:
    """Read and check a description.

    Raises:
        DamagedCheckpointError: There is none, it is not ours, or it has changed.
    """
    try:
        with open_regular(path) as file:
            if not _BEGINNING.match(file.peek(100)):
                raise DamagedCheckpointError(
                    f"{path} is not of a checkpoint that this library saved"
                )
            if (size := os.fstat(file.fileno()).st_size) > _LARGEST:
                raise ValueError(f"it has {size} bytes, more than {_LARGEST}")
            document: dict[str, Any] = json.loads(file.read())
        digest = document.pop("digest", None)
        found = sha256(canonical(document).encode()).hexdigest()
    except (OSError, ValueError, RecursionError) as error:
        message = f"{path} cannot be read as JSON: {type(error).__name__}: {error}"
        raise DamagedCheckpointError(message) from error
    if digest != found:
        raise DamagedCheckpointError(f"{path} has changed: its digest is another")
    version = document.get("version")
    if version != VERSION:
        raise DamagedCheckpointError(
            f"{path} has version {version}, and this library reads version {VERSION}"
        )
    if document.get("format") != FORMAT:
        raise DamagedCheckpointError(f"{path} is not of a checkpoint that this library saved")
    if lacking := sorted(_KEYS - set(document)):
        raise DamagedCheckpointError(f"{path} lacks {', '.join(lacking)}")
    return document

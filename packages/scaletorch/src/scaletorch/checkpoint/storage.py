"""Chunks of tensors in files: each rank writes one file, and reads from any that it needs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from .agreement import DamagedCheckpointError
from .format.metadata import Chunk, Saved
from .format.safetensors_files import (
    BLOCK,
    as_bytes,
    flush,
    map_file,
    plan_file,
    view_as,
    write_tensor,
)
from .state.record import Entry


def write_chunks(path: Path, entries: Mapping[str, Entry], step: int) -> dict[str, Saved]:
    """Write this rank's entries into one new file; return a description of its chunks."""
    parts = [(name, part) for name, entry in entries.items() for part in entry.parts]
    if not parts:
        return {}
    # The largest items first, which keeps all tensors aligned.
    parts.sort(key=lambda each: (-each[1].tensor.itemsize, each[0], each[1].offsets))
    slots = []
    for name, part in parts:
        shape, place = tuple(part.tensor.shape), ",".join(map(str, part.offsets))
        slot = name if shape == entries[name].shape else f"{name}@{place}"
        slots.append((slot, part.tensor.dtype, shape))
    beginning, starts = plan_file(slots, {"format": "pt", "step": str(step)})
    saved: dict[str, Saved] = {}
    with path.open("xb") as file:
        file.write(beginning)
        for (name, part), start in zip(parts, starts, strict=True):
            sums = write_tensor(file, part.tensor)
            chunk = Chunk(
                part.offsets, tuple(part.tensor.shape), path.name, start, part.tensor.nbytes, sums
            )
            entry = Saved(entries[name].shape, entries[name].dtype, [])
            saved.setdefault(name, entry).chunks.append(chunk)
        flush(file)
    return saved


class Read(NamedTuple):
    """A rectangle to copy."""

    name: str  # the tensor's
    saved: Saved
    chunk: Chunk  # the chunk that holds the rectangle
    begin: tuple[int, ...]  # its first index in the chunk, per dim
    target: Tensor  # the memory to fill


class Reader:
    """Reads a checkpoint's files, given the tensors in them and the size of each in bytes."""

    def __init__(self, folder: Path, saved: Mapping[str, Saved], sizes: Mapping[str, int]) -> None:
        self.folder, self._saved, self._sizes = folder, saved, sizes
        self._files: dict[str, Tensor] = {}

    def plan(self, entries: Mapping[str, Entry]) -> list[Read]:
        """Find this rank's rectangles in the chunks, and check everything that will be read."""
        reads: list[Read] = []
        for entry in entries.values():
            saved = self._saved[entry.source]
            own = [*_overlaps(entry, saved)]
            found = sum(read.target.numel() for read in own)
            wanted = sum(part.tensor.numel() for part in entry.parts)
            if found != wanted:
                raise DamagedCheckpointError(
                    f"{entry.source} has {found} of the {wanted} elements that this rank needs"
                )
            reads += own
        checked: set[tuple[str, int]] = set()
        for read in reads:
            self.check(read, checked)
        return reads

    def check(self, read: Read, checked: set[tuple[str, int]]) -> None:
        """Check the checksums of the blocks that a copy reads, unless they are in `checked`."""
        chunk, memory = read.chunk, self._bytes(read.chunk)
        for block in _blocks(read) if chunk.crc32 is not None else ():
            start = block * BLOCK
            if (chunk.file, chunk.offset + start) in checked:
                continue
            checked.add((chunk.file, chunk.offset + start))
            sums = chunk.crc32 or ()
            if zlib.crc32(as_bytes(memory[start : start + BLOCK])) != sums[block]:
                raise DamagedCheckpointError(
                    f"{self.folder / chunk.file} has changed at byte {chunk.offset + start}, in "
                    f"{read.name}: its checksum is another"
                )

    def copy(self, reads: list[Read]) -> None:
        """Fill the targets."""
        for read in reads:
            source = self.tensor(read)
            for dim, (start, size) in enumerate(zip(read.begin, read.target.shape, strict=True)):
                source = source.narrow(dim, start, size)
            read.target.copy_(source)
        self._files.clear()

    def tensor(self, read: Read) -> Tensor:
        """Return the whole chunk that holds a rectangle."""
        return view_as(self._bytes(read.chunk), read.saved.dtype, read.chunk.shape)

    def _bytes(self, chunk: Chunk) -> Tensor:
        if chunk.file not in self._files:
            path, size = self.folder / chunk.file, self._sizes.get(chunk.file, 0)
            self._files[chunk.file] = map_file(path, size)
        memory = self._files[chunk.file][chunk.offset : chunk.offset + chunk.length]
        if memory.numel() != chunk.length:
            message = f"{self.folder / chunk.file} ends before {chunk.offset + chunk.length}"
            raise DamagedCheckpointError(message)
        return memory


def _overlaps(entry: Entry, saved: Saved) -> Iterator[Read]:
    # Intersect each rectangle of this rank with each saved chunk.
    for part in entry.parts:
        for chunk in saved.chunks:
            low = [max(*pair) for pair in zip(part.offsets, chunk.at, strict=True)]
            ends = [
                min(a + size, b + other)
                for a, size, b, other in zip(
                    part.offsets, part.tensor.shape, chunk.at, chunk.shape, strict=True
                )
            ]
            if all(a < b for a, b in zip(low, ends, strict=True)):
                target = part.tensor
                for dim, (start, end) in enumerate(zip(low, ends, strict=True)):
                    target = target.narrow(dim, start - part.offsets[dim], end - start)
                begin = tuple(a - b for a, b in zip(low, chunk.at, strict=True))
                yield Read(entry.source, saved, chunk, begin, target)


def _blocks(read: Read) -> range:
    """Return the numbers of the chunk's blocks that a rectangle spans."""
    shape, size = read.chunk.shape, read.saved.dtype.itemsize
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    low = sum(start * stride for start, stride in zip(read.begin, strides, strict=True))
    span = zip(read.target.shape, strides, strict=True)
    high = low + sum((length - 1) * stride for length, stride in span) + 1
    return range(low * size // BLOCK, -(-high * size // BLOCK))

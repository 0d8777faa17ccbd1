"""Chunks of tensors in files: each rank writes one file, and reads from any that it needs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from .agreement import DamagedCheckpointError
from .format.metadata import Chunk, SavedTensor, describe_tensor
from .format.safetensors_files import BLOCK, as_bytes, map_file, view_as, write_file
from .state.record import Entry


def write_chunks(path: Path, entries: Mapping[str, Entry], step: int) -> dict[str, Any]:
    """Write this rank's entries into one new file; return descriptions of what it holds of them."""
    found = [(name, rect) for name, entry in entries.items() for rect in entry.rectangles]
    if not found:
        return {}
    # The largest items first, which keeps all tensors aligned.
    found.sort(key=lambda pair: (-pair[1].tensor.itemsize, pair[0], pair[1].offsets))
    slots = []
    for name, rectangle in found:
        shape, place = tuple(rectangle.tensor.shape), ",".join(map(str, rectangle.offsets))
        slot = name if shape == entries[name].shape else f"{name}@{place}"
        slots.append((slot, rectangle.tensor.dtype, shape))
    tensors = [rectangle.tensor for _, rectangle in found]
    written = write_file(path, slots, tensors, step=str(step))
    chunks: dict[str, list[Chunk]] = {}
    for (name, rectangle), (start, sums) in zip(found, written, strict=True):
        shape, size = tuple(rectangle.tensor.shape), rectangle.tensor.nbytes
        chunk = Chunk(rectangle.offsets, shape, path.name, start, size, sums)
        chunks.setdefault(name, []).append(chunk)
    return {n: describe_tensor(entries[n].shape, entries[n].dtype, c) for n, c in chunks.items()}


class Read(NamedTuple):
    """A rectangle to copy."""

    name: str  # the tensor's
    saved: SavedTensor
    chunk: Chunk  # the chunk that holds the rectangle
    begin: tuple[int, ...]  # its first index in the chunk, per dim
    target: Tensor  # the memory to fill


class Reader:
    """Reads a checkpoint's files, given the tensors in them and the size of each in bytes."""

    def __init__(
        self, folder: Path, saved: Mapping[str, SavedTensor], sizes: Mapping[str, int]
    ) -> None:
        self.folder, self._saved, self._sizes = folder, saved, sizes
        self._files: dict[str, Tensor] = {}
        self._checked: set[tuple[str, int]] = set()  # file and first byte of blocks

    def plan(self, entries: Mapping[str, Entry]) -> list[Read]:
        """Find this rank's rectangles in the chunks, and check everything that will be read."""
        reads: list[Read] = []
        for entry in entries.values():
            saved = self._saved[entry.source]
            own = [*_overlaps(entry, saved)]
            found = sum(read.target.numel() for read in own)
            wanted = sum(rect.tensor.numel() for rect in entry.rectangles)
            if found != wanted:
                raise DamagedCheckpointError(
                    f"the checkpoint has {found} of the {wanted} elements of {entry.source} that "
                    "this rank needs"
                )
            reads += own
        for read in reads:
            self.check(read)
        return reads

    def check(self, read: Read) -> None:
        """Check the checksums of the blocks that a copy reads, each once."""
        chunk, memory = read.chunk, self._bytes(read.chunk)
        sums = chunk.crc32 or ()  # of a foreign file none
        for block in _blocks(read) if sums else ():
            start = block * BLOCK
            place = chunk.file, chunk.offset + start
            if place in self._checked:
                continue
            self._checked.add(place)
            if zlib.crc32(as_bytes(memory[start : start + BLOCK])) != sums[block]:
                raise DamagedCheckpointError(
                    f"{self.folder / chunk.file} has changed at byte {chunk.offset + start}, in "
                    f"{read.name}: its checksum does not match"
                )

    def copy(self, reads: list[Read]) -> None:
        """Fill the targets."""
        for read in reads:
            pairs = zip(read.begin, read.target.shape, strict=True)
            place = tuple(slice(start, start + size) for start, size in pairs)
            read.target.copy_(self.tensor(read)[place])
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
            message = f"{self.folder / chunk.file} ends before byte {chunk.offset + chunk.length}"
            raise DamagedCheckpointError(message)
        return memory


def _overlaps(entry: Entry, saved: SavedTensor) -> Iterator[Read]:
    """Yield the intersections of this rank's rectangles with the saved chunks."""
    for own in entry.rectangles:
        for chunk in saved.chunks:
            places = zip(own.offsets, own.tensor.shape, chunk.at, chunk.shape, strict=True)
            spans = [range(max(a, b), min(a + m, b + n)) for a, m, b, n in places]
            if all(spans):
                pairs = zip(spans, own.offsets, strict=True)
                local = tuple(slice(span.start - at, span.stop - at) for span, at in pairs)
                begin = tuple(span.start - at for span, at in zip(spans, chunk.at, strict=True))
                yield Read(entry.source, saved, chunk, begin, own.tensor[local])


def _blocks(read: Read) -> range:
    """Return the numbers of the chunk's blocks that a rectangle spans."""
    shape, size = read.chunk.shape, read.saved.dtype.itemsize
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    low = sum(start * stride for start, stride in zip(read.begin, strides, strict=True))
    span = zip(read.target.shape, strides, strict=True)
    high = low + sum((length - 1) * stride for length, stride in span) + 1
    return range(low * size // BLOCK, -(-high * size // BLOCK))

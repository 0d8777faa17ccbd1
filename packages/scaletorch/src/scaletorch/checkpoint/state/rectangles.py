"""Flat ranges of a tensor as rectangles, and these cut where ranks' pieces of a dim begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from ..format.boxes import Box


@dataclass(frozen=True, slots=True)
class Atom:
    """Indices along a cut dim that every rank has all or nothing of.

    Attributes:
        start: First index in the whole.
        local: First index in this rank's shard.
        length: How many.
        owner: First rank that has them.
    """

    start: int
    local: int
    length: int
    owner: int


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of a whole tensor that is on this rank.

    Attributes:
        offsets: Where it begins in the whole.
        tensor: The memory that it has here, a view of the rectangle's shape.
        owner: The first tensor-parallel rank that has it.
    """

    offsets: tuple[int, ...]
    tensor: Tensor
    owner: int


def rectangles(start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    """Yield rectangles that are, one after another, a range of a row-major tensor's elements.

    A partial first row, whole rows, and a partial last one; partial rows so in turn.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        yield from _within(last, start, stop, shape)
        return
    yield from _within(first - 1, start, first * row, shape)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _within(last, last * row, stop, shape)


def _within(index: int, start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    before = index * prod(shape[1:])
    for offsets, sizes in rectangles(start - before, stop - before, shape[1:]):
        yield (index, *offsets), (1, *sizes)


def find_atoms(ranks: Sequence[Sequence[range]], rank: int) -> tuple[Atom, ...]:
    """Cut a rank's pieces of a dim wherever a piece of any rank begins or ends."""
    bounds = sorted({edge for own in ranks for r in own for edge in (r.start, r.stop)})
    atoms, local = [], 0
    for piece in ranks[rank]:
        inner = [edge for edge in bounds if piece.start < edge < piece.stop]
        for start, stop in zip([piece.start, *inner], [*inner, piece.stop], strict=True):
            if start < stop:
                owner = next(i for i, own in enumerate(ranks) if any(start in r for r in own))
                atoms.append(Atom(start, local, stop - start, owner))
                local += stop - start
    return tuple(atoms)


def cut_parts(
    tensor: Tensor,
    start: int,
    stop: int,
    shape: Sequence[int],
    dim: int | None,
    atoms: Sequence[Atom],
) -> Iterator[Part]:
    """Yield the parts of the whole that a rank's tensor holds.

    Args:
        tensor: Elements start to stop of a tensor-parallel shard: flat, or of the shard's shape.
        start: First element in the flattened shard.
        stop: One past the last.
        shape: The shard's shape.
        dim: The dim that is cut; None if the shard is the whole.
        atoms: What of that dim is here.
    """
    if tuple(tensor.shape) == tuple(shape):  # also where it is not contiguous
        boxes = [((0,) * len(shape), tensor)] if tensor.numel() else []
    else:
        found = list(rectangles(start, stop, shape))
        flat = tensor.split([prod(sizes) for _, sizes in found])
        boxes = [(at, t.view(sizes)) for (at, sizes), t in zip(found, flat, strict=True)]
    for offsets, box in boxes:
        if dim is None:
            yield Part(offsets, box, 0)
        else:
            yield from _cut_box(offsets, box, dim, atoms)


def _cut_box(
    offsets: tuple[int, ...], box: Tensor, dim: int, atoms: Sequence[Atom]
) -> Iterator[Part]:
    begin, end = offsets[dim], offsets[dim] + box.shape[dim]
    for atom in atoms:
        low, high = max(begin, atom.local), min(end, atom.local + atom.length)
        if low < high:
            at = (*offsets[:dim], atom.start + low - atom.local, *offsets[dim + 1 :])
            yield Part(at, box.narrow(dim, low - begin, high - low), atom.owner)

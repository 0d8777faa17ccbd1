"""Ranks, micro-batches and parts of a tensor in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ...compose.words import ranges
from .parts import Case, Finding, Part, box_of

DENSE = 0.3  # of the elements of a box wrong: then the whole box is said to be


def plural(case: Case, dim: int) -> str:
    """Return what the slices of a dim are called: 'rows'."""
    name = case.axes[dim] if dim < len(case.axes) else ""
    return name or f"slices of dim {dim}"


def some(case: Case, dim: int, numbers: Iterable[int]) -> str:
    """Return 'row 3' or 'rows 0-15'."""
    name, of, tail = plural(case, dim).partition(" of ")
    return f"{numbered(name.removesuffix('s'), numbers)}{of}{tail}"


def numbered(name: str, numbers: Iterable[int]) -> str:
    """Return 'rank 0', 'ranks 0 and 1' or 'micro-batches 0-3'."""
    numbers = set(numbers)
    ending = "es" if name.endswith("ch") else "s"
    return f"{name}{ending if len(numbers) > 1 else ''} {ranges(numbers)}"


def who(case: Case, parts: Sequence[Part]) -> str:
    """Return the ranks that have parts, and the micro-batches if not all of theirs: 'rank 1'."""
    held, meant = (
        {(p.piece.rank, p.piece.micro_batch) for p in each} for each in (case.parts, parts)
    )
    ranks, every = {rank for rank, _ in meant}, {rank for rank, _ in held}
    said = "every rank" if ranks == every and len(every) > 1 else numbered("rank", ranks)
    theirs = {(rank, batch) for rank, batch in held if rank in ranks}
    if meant == theirs:
        return said
    batches = {batch for _, batch in meant}
    if meant == {(rank, batch) for rank, batch in theirs if batch in batches}:
        return f"{said} ({numbered('micro-batch', batches)})"
    return f"{said} (not in all micro-batches)"


def has(subject: str) -> str:
    """Return a subject with its 'has' or 'have'."""
    return f"{subject} {'has' if subject.startswith(('every rank', 'rank ')) else 'have'}"


def where(case: Case, parts: Sequence[Part], masks: Sequence[Tensor] = ()) -> str:
    """Return ' at positions 8-11 of rows 0-15', or '' if all of the whole or of several parts.

    The masks select elements of each part; without masks the wrong elements are selected.
    """
    masks = masks or [p.mask for p in parts]
    boxes = [box_of(mask) for mask in masks]
    volumes = [math.prod(map(len, box)) for box in boxes]
    total = sum(p.have.numel() for p in parts)
    said = []
    for dim in reversed(range(case.whole.ndim)):
        pairs = zip(parts, boxes, strict=True)
        at = torch.cat([p.piece.index[dim][box[dim]] for p, box in pairs]).unique()
        if len(at) < case.whole.shape[dim] and (len(parts) == 1 or sum(volumes) < total):
            said.append(some(case, dim, at.tolist()))
    place, count = " of ".join(said), sum(int(mask.sum()) for mask in masks)
    if count > DENSE * sum(volumes):
        return f" at {place}" if place else ""
    return f" at {count} of {total} elements" + (f" ({place})" if place else "")


def told(case: Case, what: str, test: Callable[[Part], bool], why: str = "") -> Iterator[Finding]:
    """Yield what the wrong parts that pass a test have, if any does, and why that may be."""
    covers = [i for i, part in enumerate(case.wrong) if test(part)]
    if covers:
        parts = [case.wrong[i] for i in covers]
        yield Finding(frozenset(covers), f"{has(who(case, parts))} {what}{where(case, parts)}{why}")

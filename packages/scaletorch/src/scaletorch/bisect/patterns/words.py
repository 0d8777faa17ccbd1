"""Ranks, micro-batches and parts of a tensor in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ...compose.words import RUNS, listed, ranges
from .parts import Case, Finding, Part, Piece, box_of

DENSE = 0.3  # of the elements of a box wrong: then the whole box is said to be


def plural(case: Case, dim: int) -> str:
    """Return what the slices of a dim are called: 'rows'."""
    name = case.axes[dim] if dim < len(case.axes) else ""
    return name or f"slices of dim {dim}"


def single(case: Case, dim: int) -> str:
    """Return what a slice of a dim is called: 'row'."""
    name = case.axes[dim] if dim < len(case.axes) else ""
    if name.endswith("ies"):
        return name.removesuffix("ies") + "y"
    return name.removesuffix("s") or f"slice of dim {dim}"


def some(case: Case, dim: int, numbers: Iterable[int]) -> str:
    """Return 'row 3' or 'rows 0-15'."""
    numbers = list(numbers)
    name = single(case, dim) if len(numbers) == 1 else plural(case, dim)
    head, of, tail = name.partition(" of ")
    return f"{head} {ranges(numbers)}{of}{tail}"


def who(case: Case, parts: Sequence[Part]) -> str:
    """Return the ranks that have parts, and the micro-batches if not all of theirs: 'rank 1'."""
    held = {(p.piece.rank, p.piece.micro_batch) for p in case.parts}
    meant = {(p.piece.rank, p.piece.micro_batch) for p in parts}
    ranks, batches = {rank for rank, _ in meant}, {batch for _, batch in meant}
    theirs = {(rank, batch) for rank, batch in held if rank in ranks}
    if meant == theirs:
        return _ranks(case, ranks)
    if meant == {(rank, batch) for rank, batch in theirs if batch in batches}:
        return f"{_ranks(case, ranks)} ({batches_of(batches)})"
    if len(meant) <= RUNS:
        return listed([f"rank {rank} ({batches_of([batch])})" for rank, batch in sorted(meant)])
    return f"{_ranks(case, ranks)} (in {len(meant)} of {len(theirs)} micro-batches)"


def one(case: Case, piece: Piece) -> str:
    """Return 'rank 1', or 'rank 1 (micro-batch 0)' if there are several micro-batches."""
    several = len({p.piece.micro_batch for p in case.parts}) > 1
    return f"rank {piece.rank}" + (f" ({batches_of([piece.micro_batch])})" if several else "")


def has(subject: str) -> str:
    """Return a subject with its 'has' or 'have'."""
    alone = subject.startswith(("every rank", "rank ")) and " and rank " not in subject
    return f"{subject} {'has' if alone else 'have'}"


def batches_of(batches: Iterable[int]) -> str:
    """Return 'micro-batch 0' or 'micro-batches 0 and 1'."""
    batches = set(batches)
    return f"micro-batch{'es' if len(batches) > 1 else ''} {ranges(batches)}"


def rank_list(ranks: Iterable[int]) -> str:
    """Return 'rank 0' or 'ranks 0 and 1'."""
    ranks = set(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


def _ranks(case: Case, ranks: set[int]) -> str:
    held = {p.piece.rank for p in case.parts}
    if ranks == held and len(held) > 1:
        return "every rank"
    if len(ranks) > 1 and (places := _coordinates(case, ranks, held)):
        return f"{rank_list(ranks)} ({places})"
    return rank_list(ranks)


def _coordinates(case: Case, ranks: set[int], held: set[int]) -> str:
    """Return 'tp1' if these are all ranks with that place on an axis, or ''."""
    for axis, groups in case.groups.items():
        place = {rank: at for group in groups for at, rank in enumerate(group)}
        places = {place[rank] for rank in ranks if rank in place}
        if ranks == {rank for rank in held if place.get(rank) in places}:
            return f"{axis}{ranges(places)}" if len(places) == 1 else f"{axis} {ranges(places)}"
    return ""


def where(case: Case, parts: Sequence[Part], masks: Sequence[Tensor] | None = None) -> str:
    """Return ' at positions 8-11 of rows 0-15', or '' if all of the whole or of several parts.

    Args:
        case: All that is known.
        parts: Some of its parts.
        masks: The elements meant of each; None for those that are wrong.
    """
    boxes = [p.box for p in parts] if masks is None else [box_of(mask) for mask in masks]
    masks = [p.mask for p in parts] if masks is None else masks
    count = sum(int(mask.sum()) for mask in masks)
    if count > DENSE * sum(map(_volume, boxes)):
        said = _box_in_words(case, parts, boxes)
        return f" at {said}" if said else ""
    said = _box_in_words(case, parts, [box_of(mask) for mask in masks])
    total = sum(p.have.numel() for p in parts)
    return f" at {count} of {total} elements" + (f" ({said})" if said else "")


def _box_in_words(case: Case, parts: Sequence[Part], boxes: Sequence[tuple[Tensor, ...]]) -> str:
    pairs = list(zip(parts, boxes, strict=True))
    if len(parts) > 1 and all([len(at) for at in box] == list(p.have.shape) for p, box in pairs):
        return ""
    said = []
    for dim in reversed(range(case.whole.ndim)):
        at = torch.cat([p.index[dim][box[dim]] for p, box in pairs]).unique()
        if len(at) < case.whole.shape[dim]:
            said.append(some(case, dim, at.tolist()))
    return " of ".join(said)


def told(case: Case, what: str, test: Callable[[Part], bool], why: str = "") -> Iterator[Finding]:
    """Yield what the wrong parts that pass a test have, if any does, and why that may be."""
    covers = [i for i, part in enumerate(case.wrong) if test(part)]
    if covers:
        parts = [case.wrong[i] for i in covers]
        text = f"{has(who(case, parts))} {what}{where(case, parts)}{why}"
        yield Finding(frozenset(covers), text)


def number(value: float) -> str:
    """Return a number with four digits."""
    return f"{value:.4g}"


def _volume(box: tuple[Tensor, ...]) -> int:
    volume = 1
    for at in box:
        volume *= len(at)
    return volume

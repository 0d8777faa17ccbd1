"""Rows of the batch, and positions, that a rank has where nobody describes them.

They are told by value: what a rank's model takes are rows of what the model of the reference takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from ...dist.errors import InvalidArgumentError
from ..keys import FORWARD
from ..recording.described import as_ranges
from ..recording.folder import Recording

Steps = Mapping[int, Sequence[Recording]]
Calls = list[Tensor]  # what one input of the model was in each of its calls
_ABSENT, _ALIKE = -1, -2  # no row of the reference, or several


def infer_rows(reference: Steps, run: Steps) -> list[str]:
    """Note in the headers of recordings which rows each call of the model had.

    Nothing is noted where a program has described its ranks, where every call had what that of the
    reference had, and where rows of the reference are alike.

    Returns:
        Which rows no rank has.

    Raises:
        InvalidArgumentError: Ranks have rows that are not in the reference.
    """
    notes: list[str] = []
    for step in sorted(set(reference) & set(run)):
        theirs, ours = reference[step], run[step]
        said = any(e.header["axes"] or e.header["micro_batches"] > 1 for e in (*theirs, *ours))
        fed = _fed(theirs[0]) if len(theirs) == 1 and not said else {}
        for item, whole in list(fed.items())[:1]:
            calls = {each.rank: _fed(each).get(item, []) for each in ours}
            calls = {rank: own for rank, own in calls.items() if own}
            coarse = max((t.dtype for t in chain(whole, *calls.values())), key=_coarseness)
            whole = [each.to(coarse) for each in whole]
            calls = {rank: [each.to(coarse) for each in own] for rank, own in calls.items()}
            if len(ours) > 1 or any(len(own) != len(whole) for own in calls.values()):
                notes += _infer(whole, calls, theirs[0], ours)
    return notes


def take_rows(reference: Steps, noise: Steps) -> Steps:
    """Return recordings of one process in a lower dtype with what was noted in the reference."""
    for step in set(reference) & set(noise):
        for theirs, other in zip(reference[step], noise[step], strict=False):
            other.header.update({name: theirs.header[name] for name in ("axes", "micro_batches")})
    return noise


def _fed(recording: Recording) -> dict[str, Calls]:
    """Return what the model took in each call by input, whole numbers first."""
    found: dict[str, Calls] = {}
    for number, line in enumerate(recording.lines):
        whose = line.kind, line.name, line.stage
        if whose == (FORWARD, "", 0) and line.item.startswith("in.") and " " not in line.item:
            found.setdefault(line.item, []).append(recording.tensor(number))
    found = {item: calls for item, calls in found.items() if all(t.ndim > 1 for t in calls)}
    return dict(sorted(found.items(), key=lambda each: each[1][0].is_floating_point()))


def _coarseness(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _infer(
    whole: Calls, calls: Mapping[int, Calls], reference: Recording, ours: Sequence[Recording]
) -> list[str]:
    if len({each.shape[1:] for each in whole}) > 1 or all(
        len(own) == len(whole) and all(map(torch.equal, own, whole)) for own in calls.values()
    ):
        return []
    together = [torch.cat(whole)]
    found = {rank: _places(own, whole) for rank, own in calls.items()}
    one_batch = all(
        len(calls[rank]) == len(whole) and places and all(own == places[1][0] for own in places[1])
        for rank, places in found.items()
    )
    if not one_batch:  # calls are micro-batches, those of the reference too
        found = {rank: _places(own, together * len(own)) for rank, own in calls.items()}
    if not all(found.values()):
        _refuse_others(together[0], calls, reference, len(ours))
        return []
    total, length = len((whole if one_batch else together)[0]), whole[0].shape[1]
    for recording in ours:
        peer = _peer(recording, found)
        if (places := found.get(peer)) is None:
            continue
        cut, rows = places
        parts = [as_ranges(each) for each in (rows[:1] if one_batch else rows)]
        recording.header["axes"]["rows"] = [total, parts]
        if len(cut) < length:
            recording.header["axes"]["positions"] = [length, [as_ranges(cut)]]
        recording.header["micro_batches"] = len(parts)
    if not one_batch and len(whole) > 1:
        ends = torch.tensor([len(each) for each in whole]).cumsum(0).tolist()
        parts = [[(end - len(each), end)] for each, end in zip(whole, ends, strict=True)]
        reference.header["axes"]["rows"] = [total, parts]
        reference.header["micro_batches"] = len(parts)
    had = {row for places in found.values() if places for rows in places[1] for row in rows}
    lacking = as_ranges(row for row in range(total) if row not in had)
    return [f"of the {total} rows of the batch no rank has {lacking}"] if lacking else []


def _peer(recording: Recording, found: Mapping[int, object]) -> int:
    """Return the rank whose rows a rank has: its own, or that of its pipeline's first stage."""
    ranks = recording.header.get("pipeline", found)
    return recording.rank if recording.rank in found else next((r for r in ranks if r in found), -1)


def _places(own: Calls, whole: Calls) -> tuple[Sequence[int], list[list[int]]] | None:
    """Return the positions that a rank has, and the rows of each call; None if none are sure."""
    ways = [
        (cut, [_rows(each, other, cut) for each, other in zip(own, whole, strict=False)])
        for cut in _cuts(whole[0], own[0])
    ]
    sure = [(cut, rows) for cut, rows in ways if min(chain(*rows), default=_ABSENT) >= 0]
    return sure[0] if len(sure) == 1 else None


def _cuts(whole: Tensor, own: Tensor) -> Iterator[Sequence[int]]:
    """Yield the positions that a rank may have: all, or equal shards as they are usually cut."""
    length, size = whole.shape[1], own.shape[1]
    if size == length:
        yield range(length)
    elif whole.ndim == 2 and length % size == 0:
        shards, half = length // size, size // 2
        for shard in range(shards):
            last = length - (shard + 1) * half
            yield range(shard * size, (shard + 1) * size)
            yield range(shard, length, shards)
            if size == 2 * half:
                yield [*range(shard * half, (shard + 1) * half), *range(last, last + half)]


def _rows(own: Tensor, whole: Tensor, cut: Sequence[int]) -> list[int]:
    """Return which row each row is; `_ABSENT` if there is none, `_ALIKE` if there are several."""
    if own.shape[1:] != whole[:1, list(cut)].shape[1:]:
        return [_ABSENT]
    known: dict[tuple[float, ...], int] = {}
    for number, row in enumerate(whole[:, list(cut)].flatten(1).tolist()):
        known[tuple(row)] = _ALIKE if tuple(row) in known else number
    return [known.get(tuple(row), _ABSENT) for row in own.flatten(1).tolist()]


def _refuse_others(
    whole: Tensor, calls: Mapping[int, Calls], reference: Recording, ranks: int
) -> None:
    """Raise if ranks have whole rows that are not in the reference."""
    every = range(whole.shape[1])
    if any(each.shape[1:] != whole.shape[1:] for each in chain(*calls.values())):
        return
    found = {r: list(chain(*(_rows(o, whole, every) for o in own))) for r, own in calls.items()}
    if others := {rank: rows.count(_ABSENT) for rank, rows in found.items() if _ABSENT in rows}:
        rows = {tuple(row) for each in chain(*calls.values()) for row in each.flatten(1).tolist()}
        raise InvalidArgumentError(
            f"these steps are of other global batches: {len(whole)} rows in "
            f"{reference.path.parent}, {len(rows)} on {ranks} ranks, and of the rows of ranks "
            f"{list(others)} {list(others.values())} are not among those. Give one process the "
            "whole batch, as by a batch size on ranks that is divided by WORLD_SIZE; and if all "
            "ranks are to have the same rows, these ranks have others"
        )

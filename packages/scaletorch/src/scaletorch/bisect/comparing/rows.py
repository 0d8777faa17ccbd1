"""Inference of each rank's rows and positions, if the program does not describe them.

Values decide: the inputs of a rank's model are rows of the inputs of the reference's model.
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
_ABSENT, _SEVERAL = -1, -2  # in place of a row number: the reference has no such row, or several


def infer_rows(reference: Steps, run: Steps) -> list[str]:
    """Note in the headers of recordings the rows and positions of each call of the model.

    Calls count as micro-batches. Nothing is noted if a program has described its ranks, if every
    call has the same inputs as the reference's, or if equal rows in the reference leave it open.

    Returns:
        Remarks for the report: the rows of the batch that no rank has.

    Raises:
        InvalidArgumentError: Ranks have rows that are not in the reference.
    """
    notes: list[str] = []
    for step in sorted(set(reference) & set(run)):
        alone, ours = reference[step][0], run[step]
        said = any(e.header["axes"] or e.header["micro_batches"] > 1 for e in (alone, *ours))
        item, own = next(iter(_fed(alone).items()), ("", []))
        if said or len(reference[step]) > 1 or len({t.shape[1:] for t in own}) != 1:
            continue
        fed = {-1: own, **{each.rank: _fed(each).get(item, []) for each in ours}}
        coarse = max((t.dtype for t in chain(*fed.values())), key=_coarseness)
        calls = {rank: [t.to(coarse) for t in each] for rank, each in fed.items() if each}
        own = calls.pop(-1)
        equal = all(len(c) == len(own) and all(map(torch.equal, c, own)) for c in calls.values())
        if not equal and (len(ours) > 1 or len(calls.get(0, own)) != len(own)):
            notes += _infer(own, calls, alone, ours)
    return notes


def take_rows(reference: Steps, noise: Steps) -> Steps:
    """Copy the reference's notes into a run of one process in a lower dtype, and return that."""
    for step in set(reference) & set(noise):
        for theirs, other in zip(reference[step], noise[step], strict=False):
            other.header.update({name: theirs.header[name] for name in ("axes", "micro_batches")})
    return noise


def _fed(recording: Recording) -> dict[str, list[Tensor]]:
    """Return the model's inputs in each call, by item; integer inputs first."""
    found: dict[str, list[Tensor]] = {}
    for number, line in enumerate(recording.lines):
        whose = line.kind, line.name, line.stage
        if whose == (FORWARD, "", 0) and line.item.startswith("in.") and " " not in line.item:
            found.setdefault(line.item, []).append(recording.tensor(number))
    found = {item: calls for item, calls in found.items() if all(t.ndim > 1 for t in calls)}
    return dict(sorted(found.items(), key=lambda each: each[1][0].is_floating_point()))


def _coarseness(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _infer(
    theirs: list[Tensor],
    calls: Mapping[int, list[Tensor]],
    alone: Recording,
    ours: Sequence[Recording],
) -> list[str]:
    whole, found, others = torch.cat(theirs), {}, []
    # A rank's rows are sure if they are found, each once, for exactly one choice of positions.
    for rank, own in calls.items():
        ways = [(cut, [_rows(t, whole, cut) for t in own]) for cut in _cuts(whole, own[0])]
        sure = [(cut, rows) for cut, rows in ways if min(chain(*rows)) >= 0]
        if len(sure) == 1:
            found[rank] = sure[0]
        elif len(ways) == 1 and _ABSENT in chain(*ways[0][1]):
            others.append(rank)
    if others:
        had = {tuple(row) for t in chain(*calls.values()) for row in t.flatten(1).tolist()}
        raise InvalidArgumentError(
            f"these steps are of other global batches: {len(whole)} rows in {alone.path.parent}, "
            f"{len(had)} on {len(ours)} ranks, and ranks {others} have rows that are not among the "
            "former: give one process all rows, as by a batch size divided by WORLD_SIZE on ranks"
        )
    if len(found) < len(calls):
        return []
    for recording in ours:  # later pipeline stages have the rows of the first
        peers = [recording.rank, *recording.header.get("pipeline", ())]
        for cut, rows in [found[peer] for peer in peers if peer in found][:1]:
            _note(recording, len(whole), rows)
            if len(cut) < whole.shape[1]:
                recording.header["axes"]["positions"] = [whole.shape[1], [as_ranges(cut)]]
    _note(alone, len(whole), [list(c) for c in torch.arange(len(whole)).split([*map(len, theirs)])])
    lacking = set(range(len(whole))) - {r for _, rows in found.values() for r in chain(*rows)}
    named = as_ranges(sorted(lacking))
    return [f"of the {len(whole)} rows of the batch no rank has {named}"] if lacking else []


def _note(recording: Recording, total: int, rows: list[list[int]]) -> None:
    recording.header["axes"]["rows"] = [total, [as_ranges(map(int, each)) for each in rows]]
    recording.header["micro_batches"] = len(rows)


def _cuts(whole: Tensor, own: Tensor) -> Iterator[Sequence[int]]:
    """Yield the positions that a rank may have: all, or a contiguous, strided or zigzag shard."""
    length, size = whole.shape[1], own.shape[1]
    if whole.shape[1:] == own.shape[1:]:
        yield range(length)
    elif whole.ndim == own.ndim == 2 and size and length % size == 0:
        for shard in range(length // size):
            begin, last = shard * (size // 2), length - (shard + 1) * (size // 2)
            yield range(shard * size, (shard + 1) * size)
            yield range(shard, length, length // size)
            if size % 2 == 0:
                yield [*range(begin, begin + size // 2), *range(last, last + size // 2)]


def _rows(own: Tensor, whole: Tensor, cut: Sequence[int]) -> list[int]:
    """Return the number in `whole` of each row of `own`, or `_ABSENT` or `_SEVERAL`."""
    known: dict[tuple[float, ...], int] = {}
    for number, row in enumerate(whole[:, list(cut)].flatten(1).tolist()):
        known[tuple(row)] = _SEVERAL if tuple(row) in known else number
    return [known.get(tuple(row), _ABSENT) for row in own.flatten(1).tolist()]

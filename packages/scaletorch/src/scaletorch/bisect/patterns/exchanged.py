"""Guesses that a rank has what another should have, or the same rank in another micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...compose.words import RUNS, listed
from .moved import distances, sketch
from .parts import ROOM, Case, Finding, Part, norm
from .words import has, one, rank_list, where, who

Pair = tuple[Part, Part]


def exchanged(case: Case) -> Iterator[Finding]:
    """Find parts that belong to another, or that another is added to."""
    instead: dict[int, Pair] = {}
    added: dict[int, Pair] = {}
    for i, part, other in _candidates(case):
        if i not in instead and case.agrees(part.have, other.want, part.want):
            instead[i] = part, other
        elif i not in added and case.agrees(part.have, part.want + other.want, part.want):
            added[i] = part, other
    if instead:
        yield Finding(frozenset(instead), _instead(case, list(instead.values())))
    if added:
        parts = [part for part, _ in added.values()]
        of = listed([one(case, other.piece) for _, other in added.values()][:RUNS])
        text = f"{has(who(case, parts))} the part of {of} added to the right one"
        yield Finding(frozenset(added), f"{text}{where(case, parts)}")


def _candidates(case: Case) -> Iterator[tuple[int, Part, Part]]:
    """Yield each wrong part with those of others that it, or its difference, resembles."""
    wants = [sketch(p.want.reshape(1, -1)) for p in case.parts]
    for i, part in enumerate(case.wrong):
        gap = part.have - part.want
        mine = [sketch(t.reshape(1, -1)) for t in (part.have, gap)]
        for j in sorted(range(len(case.parts)), key=lambda j: _near(case, part, case.parts[j])):
            other = case.parts[j]
            if other.want.shape != part.want.shape or _same(other, part):
                continue
            norms = norm(part.have), norm(other.want), norm(part.want)
            room = 4 * ROOM * case.allowed(part.have.numel(), *norms)
            if min(float(distances(each, wants[j])) for each in mine) <= room:
                yield i, part, other


def _same(part: Part, other: Part) -> bool:
    return all(torch.equal(a, b) for a, b in zip(part.index, other.index, strict=True))


def _near(case: Case, part: Part, other: Part) -> tuple[bool, bool, bool]:
    """Return a key that sorts the same rank, the same micro-batch and a peer of an axis first."""
    ours, theirs = part.piece, other.piece
    return (
        ours.rank != theirs.rank,
        ours.micro_batch != theirs.micro_batch,
        not _peers(case, ours.rank, theirs.rank),
    )


def _peers(case: Case, rank: int, other: int) -> list[str]:
    """Return the axes in a group of which both ranks are."""
    return [
        axis
        for axis, groups in case.groups.items()
        if any(rank in group and other in group for group in groups)
    ]


def _instead(case: Case, pairs: Sequence[Pair]) -> str:
    """Return 'rank 1 has the part of rank 0', and as much of several."""
    ranks = [(a.piece.rank, b.piece.rank) for a, b in pairs]
    batches = [(a.piece.micro_batch, b.piece.micro_batch) for a, b in pairs]
    if all(a == b for a, b in ranks) and len(set(batches)) == 1:
        ours, theirs = batches[0]
        subject = has(rank_list(a for a, _ in ranks))
        return f"{subject} in micro-batch {ours} what micro-batch {theirs} should have"
    if all(a == b for a, b in batches):
        labels = {a: f"rank {a}" for pair in ranks for a in pair}
        return _pairs([(labels[a], labels[b]) for a, b in dict.fromkeys(ranks)]) + _axis(
            case, ranks
        )
    return _pairs([(one(case, a.piece), one(case, b.piece)) for a, b in pairs]) + _axis(case, ranks)


def _pairs(pairs: Sequence[tuple[str, str]]) -> str:
    """Return 'a has the part of b, c and d have each other's part'."""
    owners: dict[str, list[str]] = {}
    for ours, theirs in pairs:
        owners.setdefault(theirs, []).append(ours)
    said: dict[str, None] = {}
    for theirs, all_ours in owners.items():
        if len(all_ours) == 1 and owners.get(all_ours[0]) == [theirs]:
            said[f"{listed(sorted([all_ours[0], theirs]))} have each other's part"] = None
        else:
            verb = "have" if len(all_ours) > 1 else "has"
            said[f"{listed(all_ours)} {verb} the part of {theirs}"] = None
    return ", ".join(list(said)[:RUNS]) + (" and so on" if len(said) > RUNS else "")


def _axis(case: Case, ranks: Sequence[tuple[int, int]]) -> str:
    """Return ' (peers in cp)' if that holds for all pairs of ranks, or ''."""
    common = set(case.groups)
    for rank, other in ranks:
        common &= set(_peers(case, rank, other)) if rank != other else set()
    return f" (peers in {listed(sorted(common))})" if common else ""

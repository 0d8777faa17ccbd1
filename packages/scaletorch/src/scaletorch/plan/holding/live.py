"""How many micro-batches of each chunk a rank of the pipeline keeps at a time.

Of a backward in two halves the first ends what autograd keeps. What the second one needs stays
until then: so a rank keeps whole micro-batches, and halves of some.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from operator import ge
from typing import NamedTuple

from ...parallel.pipeline_parallel import SCHEDULES
from .repeating import enough

Counts = tuple[int, ...]
Moments = tuple[Counts, ...]
"""Whole micro-batches by chunk, and behind them halves by chunk if the schedule has such, at those
moments at which no others have more of all."""


class During(NamedTuple):
    """What a rank keeps while an action runs, at the moments at which it is the most.

    Attributes:
        kind: Of the action: "F", whose own micro-batch counts, "B", or "I" and "W" for the halves
            of a backward, which have theirs still.
        chunk: Of the action.
        moments: Those.
    """

    kind: str
    chunk: int
    moments: Moments


Live = tuple[During, ...]
Moves = Iterable[tuple[str, int]]  # kinds and chunks of actions


SPLIT = ("zb_h1", "zb_v", "dualpipe_v")  # schedules whose backwards may come in two halves
# What an action changes: whole micro-batches, and halves.
CHANGES = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1)}


def most_live(schedule: str, pp: int, micro_batches: int, chunks: int) -> tuple[Live, ...]:
    """Return for each rank what it keeps at the moments at which it may keep the most.

    The sum of one moment, at its largest, is `check(schedule).peak_live`. No schedule is built,
    but for the V-shaped ones, and these with no more micro-batches than they have to have
    for each action to occur.
    """
    return _most_live(schedule, pp, enough(schedule, pp, micro_batches), chunks)


def backwards(
    schedule: str, pp: int, micro_batches: int, chunks: int
) -> tuple[tuple[int, ...], ...]:
    """Return how many actions of backward each rank has, by chunk, halves of one as two."""
    m = micro_batches
    if schedule == "dualpipe_v":  # its halves come while the pipeline fills and drains
        return tuple(tuple(m + halves for halves in own) for own in _halves(pp, min(m, 2 * pp)))
    return ((2 * m if schedule in SPLIT else m,) * chunks,) * pp


def halved(schedule: str, pp: int, micro_batches: int) -> tuple[tuple[bool, ...], ...]:
    """Return for each rank and chunk whether its first backward has halves; () if none has."""
    if schedule not in SPLIT:
        return ((),) * pp
    if schedule != "dualpipe_v":
        return ((True, True) if schedule == "zb_v" else (True,),) * pp
    return _halved(schedule, pp, min(micro_batches, 2 * pp + 1))


@lru_cache(maxsize=4096)
def _halved(schedule: str, pp: int, m: int) -> tuple[tuple[bool, ...], ...]:
    built = SCHEDULES[schedule](pp, m)
    first = [{a.chunk: a.kind for a in reversed(rank) if a.kind in "BI"} for rank in built.ranks]
    return tuple(tuple(own[chunk] == "I" for chunk in sorted(own)) for own in first)


@lru_cache(maxsize=4096)
def _halves(pp: int, m: int) -> tuple[tuple[int, ...], ...]:
    built = SCHEDULES["dualpipe_v"](pp, m)
    return tuple(
        tuple(sum(a.kind == "W" and a.chunk == chunk for a in rank) for chunk in range(2))
        for rank in built.ranks
    )


@lru_cache(maxsize=4096)
def _most_live(schedule: str, pp: int, m: int, chunks: int) -> tuple[Live, ...]:
    ranks = range(pp)
    if schedule == "1f1b":
        return tuple(_at(0, (min(pp - rank, m),)) for rank in ranks)
    if schedule == "afab":
        return (_at(0, (m,)),) * pp
    if schedule == "zb_h1":
        return tuple(_put_off(rank, pp, m) for rank in ranks)
    if schedule == "looped_bfs":
        alive = [(m,) * (at + 1) + (0,) * (chunks - 1 - at) for at in range(chunks)]
        return (tuple(each for at, now in enumerate(alive) for each in _at(at, now)),) * pp
    if schedule == "interleaved_1f1b":
        return tuple(_interleaved(rank, pp, m, chunks) for rank in ranks)
    built = SCHEDULES[schedule](pp, m)
    return tuple(
        _alive([(action.kind, action.chunk) for action in own], 2 * chunks) for own in built.ranks
    )


def _at(chunk: int, now: Counts) -> Live:
    """Return what is kept while the last forward of a chunk runs, and then the first backward."""
    return During("F", chunk, (now,)), During("B", chunk, (now,))


def _put_off(rank: int, pp: int, m: int) -> Live:
    """Follow "zb_h1": a rank runs a "W" as soon as it has more halves than its number."""
    most = min(m, pp - rank)
    first = [(min(m - done, pp - rank), min(done, rank)) for done in range(m)]
    second = max(min(m, pp) - rank - 1, 0), min(rank + 1, m)
    forward = During("F", 0, ((most, min(m - most, rank)),))
    return forward, During("I", 0, tuple(outer({*first}))), During("W", 0, (second,))


def _interleaved(rank: int, pp: int, m: int, chunks: int) -> Live:
    number = max(1, m // pp)
    size, longer = divmod(m, number)
    shown = [size + 1] * longer + [size] * (number - longer)
    ahead = min((chunks - 1) * shown[0] + 2 * (pp - rank - 1), m * chunks)
    forwards = [c for each in shown for c in range(chunks) for _ in range(each)]
    backwards = [c for each in shown for c in reversed(range(chunks)) for _ in range(each)]
    moves = [("F", chunk) for chunk in forwards[:ahead]]
    for made, done in zip(forwards[ahead:], backwards, strict=False):
        moves += [("F", made), ("B", done)]
    moves += [("B", chunk) for chunk in backwards[len(forwards) - ahead :]]
    return _alive(moves, chunks)


def _alive(moves: Moves, counts: int) -> Live:
    """Return what actions keep.

    Args:
        moves: The actions.
        counts: The chunks, or twice as many if backwards have halves.
    """
    found = defaultdict[tuple[str, int], set[Counts]](set)
    now = [0] * counts
    before = tuple(now)
    for kind, chunk in moves:
        whole, half = CHANGES[kind]
        now[chunk] += whole
        if half:
            now[chunk + counts // 2] += half
        after = tuple(now)
        found[kind, chunk].add(after if kind == "F" else before)
        before = after
    return tuple(During(*key, tuple(outer(moments))) for key, moments in found.items())


def outer(counts: Iterable[Counts]) -> list[Counts]:
    """Return those that may have the most bytes, whatever the sizes of all are.

    Others have no more of anything than another one, or than a mean of two others.
    """
    found: list[Counts] = []
    for each in sorted(counts, reverse=True):
        if found and all(map(ge, found[-1], each)):
            continue
        while len(found) > 1 and _between(found[-2], found[-1], each):
            found.pop()
        if not any(all(map(ge, more, each)) for more in found):
            found.append(each)
    return found


def _between(first: Counts, middle: Counts, last: Counts) -> bool:
    """Return whether a mean of the outer ones has as much of all as the one in the middle."""
    whole, part = first[0] - last[0], middle[0] - last[0]
    if whole <= 0:
        return False
    rest = whole - part
    for a, b, c in zip(first, middle, last, strict=True):  # a search spends much of its time here
        if whole * b > part * a + rest * c:
            return False
    return True

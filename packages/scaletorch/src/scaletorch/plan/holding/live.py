"""How many micro-batches of each chunk a rank of the pipeline keeps at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from ...parallel.pipeline_parallel import SCHEDULES

Live = tuple[tuple[int, ...], ...]
"""Numbers of micro-batches by chunk, at those moments at which no other moment has more of all."""

KEPT = {"F": 1, "B": -1, "I": 0, "W": -1}
ROUNDS = 4  # of interleaving, after which all repeats itself


def most_live(schedule: str, pp: int, micro_batches: int, chunks: int) -> tuple[Live, ...]:
    """Return for each rank what it keeps at the moments at which it may keep the most.

    The sum of one moment, at its largest, is `check(schedule).peak_live`. No schedule is built,
    but for the V-shaped ones, and these with no more micro-batches than they have to have for each
    action to occur.
    """
    return _most_live(schedule, pp, enough(schedule, pp, micro_batches, chunks), chunks)


def enough(schedule: str, pp: int, micro_batches: int, chunks: int) -> int:
    """Return how many micro-batches keep as much alive as so many."""
    if schedule == "interleaved_1f1b" and micro_batches % pp == 0:
        return min(micro_batches, (ROUNDS + chunks) * pp)
    if schedule in ("zb_v", "dualpipe_v"):
        return min(micro_batches, 2 * pp + 1)
    if schedule in ("1f1b", "zb_h1"):
        return min(micro_batches, pp)
    return micro_batches


def backwards(schedule: str, pp: int, micro_batches: int, chunks: int) -> tuple[int, ...]:
    """Return how many actions of backward each rank has, halves of one as two."""
    whole = micro_batches * chunks
    if schedule in ("zb_h1", "zb_v"):
        return (2 * whole,) * pp
    if schedule == "dualpipe_v":  # its halves come while the pipeline fills and drains
        return tuple(whole + halves for halves in _halves(pp, min(micro_batches, 2 * pp)))
    return (whole,) * pp


@lru_cache(maxsize=4096)
def _halves(pp: int, m: int) -> tuple[int, ...]:
    built = SCHEDULES["dualpipe_v"](pp, m)
    return tuple(sum(action.kind == "W" for action in rank) for rank in built.ranks)


def fullest(live: Live, kept: Sequence[int]) -> int:
    """Return the most bytes that are kept at a time, of so many for a micro-batch of each chunk."""
    if len(kept) == 2:  # most schedules that have chunks, and thrice as quick
        first, second = kept
        return max([a * first + b * second for a, b in live])
    return max(sum(n * each for n, each in zip(now, kept, strict=True)) for now in live)


@lru_cache(maxsize=4096)
def _most_live(schedule: str, pp: int, m: int, chunks: int) -> tuple[Live, ...]:
    ranks = range(pp)
    if schedule == "1f1b":
        return tuple(((min(pp - rank, m),),) for rank in ranks)
    if schedule == "afab":
        return (((m,),),) * pp
    if schedule == "zb_h1":  # a forward before the oldest "W", which is put off by the rank
        return tuple(((min(pp, m),),) for _ in ranks)
    if schedule == "looped_bfs":
        return (((m,) * chunks,),) * pp
    if schedule == "interleaved_1f1b":
        return tuple(_interleaved(rank, pp, m, chunks) for rank in ranks)
    built = SCHEDULES[schedule](pp, m)
    return tuple(
        _maximal(_counted(((a.chunk, KEPT[a.kind]) for a in actions), chunks))
        for actions in built.ranks
    )


def _interleaved(rank: int, pp: int, m: int, chunks: int) -> Live:
    """Follow the first rounds of each length; the others repeat them."""
    number = max(1, m // pp)
    size, larger = divmod(m, number)
    enough = ROUNDS + chunks
    shown = [size + 1] * min(larger, enough) + [size] * min(number - larger, enough)
    ahead = min((chunks - 1) * shown[0] + 2 * (pp - rank - 1), sum(shown) * chunks)
    forwards = [c for each in shown for c in range(chunks) for _ in range(each)]
    backwards = [c for each in shown for c in reversed(range(chunks)) for _ in range(each)]
    moves = [(chunk, 1) for chunk in forwards[:ahead]]
    for made, done in zip(forwards[ahead:], backwards, strict=False):
        moves += [(made, 1), (done, -1)]
    return _maximal(_counted(moves, chunks))


def _counted(moves: Iterable[tuple[int, int]], chunks: int) -> Iterator[tuple[int, ...]]:
    """Yield what is kept before each end of a micro-batch's life, and at last."""
    now = [0] * chunks
    grew = False
    for chunk, change in moves:
        if change < 0 and grew:
            yield tuple(now)
        now[chunk] += change
        grew = change > 0 or (grew and not change)
    yield tuple(now)


def _maximal(moments: Iterable[tuple[int, ...]]) -> Live:
    """Leave out moments of which another one has as much of everything."""
    found: list[tuple[int, ...]] = []
    for each in sorted(set(moments), reverse=True):
        if not any(all(a >= b for a, b in zip(more, each, strict=True)) for more in found):
            found.append(each)
    return tuple(found)

"""From what was seen of two steps to numbers that are affine in rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from ..description import Affine, Behaviour, Parameter, Sent, Work
from .observed import BACKWARD, FORWARD, PHASES, Observed, Operation


def behaviour(
    kind: int, rows: tuple[int, int], pair: Sequence[Observed], parameters: Sequence[Parameter]
) -> Behaviour:
    """Return how a kind of block behaves, from steps of two numbers of rows.

    Args:
        kind: Of the block.
        rows: Of the steps.
        pair: What was seen of them.
        parameters: Of the block.
    """

    def line(figure: Callable[[Observed], float]) -> Affine:
        return _affine(rows, figure(pair[0]), figure(pair[1]))

    return Behaviour(
        tuple(parameters),
        kept=line(lambda seen: seen.kept[kind]),
        shared=line(lambda seen: seen.shared[kind]),
        left=line(lambda seen: seen.left[kind]),
        entered=line(lambda seen: seen.entered.get(kind, 0)),
        again=line(lambda seen: seen.kept[kind] - seen.kept_inputs[kind]),
        forward_peak=line(lambda seen: _forward_peak(seen, kind)),
        backward_peak=line(lambda seen: _backward_peak(seen, kind)),
        handed=line(lambda seen: seen.handed.get(kind, 0)),
        sent=tuple(_all_sent(kind, rows, pair)),
        work=tuple(_all_work(kind, rows, pair)),
    )


def _affine(rows: tuple[int, int], low: float, high: float) -> Affine:
    slope = (high - low) / (rows[1] - rows[0])
    return Affine(low - slope * rows[0], slope)


def _forward_peak(seen: Observed, kind: int) -> int:
    above = seen.peaks.get((kind, FORWARD), 0) - seen.bases.get((kind, FORWARD), 0)
    return max(above - seen.kept[kind] - seen.shared[kind], 0)


def _backward_peak(seen: Observed, kind: int) -> int:
    return max(seen.peaks.get((kind, BACKWARD), 0) - seen.bases.get((kind, BACKWARD), 0), 0)


def _all_sent(kind: int, rows: tuple[int, int], pair: Sequence[Observed]) -> Iterator[Sent]:
    for phase in PHASES:
        sides = [sorted(each.seen[kind, phase].sent) for each in pair]
        for (axis, operation), group in groupby(
            zip(*sides, strict=False), key=lambda each: each[0][:2]
        ):
            found = [*group]
            sizes = _affine(rows, *(sum(each[side][2] for each in found) for side in (0, 1)))
            yield Sent(axis, operation, phase, len(found), sizes)


def _all_work(kind: int, rows: tuple[int, int], pair: Sequence[Observed]) -> Iterator[Work]:
    """Yield products of one size together, and what only moves memory if it moves about as much."""
    for phase in PHASES:
        sides = [each.seen[kind, phase].work for each in pair]
        for sort in sorted({operation[0] for side in sides for operation in side}):
            found = [[each for each in side if each[0] == sort] for side in sides]
            for both in _alike(*found):
                flops = _affine(rows, *(sum(each[1] for each in side) for side in both))
                moved = _affine(rows, *(sum(each[2] for each in side) for side in both))
                yield Work(sort, max(map(len, both)), flops, moved, phase)


def _alike(low: list[Operation], high: list[Operation]) -> Iterator[list[list[Operation]]]:
    """Yield operations of one size, of both steps; all together if one step has more of them.

    What rows decide, such as which experts have tokens, may leave some out.
    """
    if len(low) != len(high):
        yield [low, high]
        return

    def size(both: tuple[Operation, Operation]) -> tuple[float, int]:
        _, flops, moved = both[0]
        return flops, 0 if flops else int(moved).bit_length() // 3  # within a factor of 8

    for _, group in groupby(sorted(zip(low, high, strict=True), key=size), key=size):
        yield [[*side] for side in zip(*group, strict=True)]

"""Whether boxes lie in a whole without gaps or overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes
_PAIRS = 1000  # boxes that are compared each with each where no cut divides them


def tile(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Return whether boxes within `shape` have each of its elements exactly once.

    As many elements as the whole has, none of them twice.
    """
    filled = [box for box in boxes if prod(box[1])]
    return sum(prod(sizes) for _, sizes in filled) == prod(shape) and _apart(filled, len(shape))


def _apart(boxes: Sequence[Box], dims: int) -> bool:
    """Return whether no two boxes overlap: cut where nothing crosses, look at each side alone."""
    groups = [boxes]
    for _ in range(4 * dims + 8):  # ours need about one round a dim; each costs n log n at most
        rounds = [_cut_once(group, dims) for group in groups if len(group) > 1]
        groups = [side for sides in rounds if len(sides) > 1 for side in sides]
        if not all(_pairs_apart(sides[0]) for sides in rounds if len(sides) == 1):
            return False
        if not groups:
            return True
    return False


def _cut_once(boxes: Sequence[Box], dims: int) -> list[list[Box]]:
    """Divide boxes along the first dim that divides them; one group if none does."""
    cuts = (_cut(boxes, dim) for dim in range(dims))
    return next((sides for sides in cuts if len(sides) > 1), [list(boxes)])


def _cut(boxes: Sequence[Box], dim: int) -> list[list[Box]]:
    """Divide boxes along a dim, wherever none of them reaches from one side to the other."""
    sides: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box[0][dim]):
        if box[0][dim] >= end:
            sides.append([])
        sides[-1].append(box)
        end = max(end, box[0][dim] + box[1][dim])
    return sides


def _pairs_apart(boxes: Sequence[Box]) -> bool:
    if len(boxes) > _PAIRS:  # none that this library has cut
        return False
    return not any(_meet(a, b) for i, a in enumerate(boxes) for b in boxes[:i])


def _meet(one: Box, other: Box) -> bool:
    sides = zip(*one, *other, strict=True)
    return all(at < there + far and there < at + size for at, size, there, far in sides)

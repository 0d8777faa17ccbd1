"""What experts make of a stage's ranks, those of one pp coordinate: sizes, and a rank's place.

The ranks of a stage are a line in the order (dp, cp, tp), tp fastest. Experts fold it anew:
`index = (edp * EP + ep) * ETP + etp`, with EP sets of experts, each cut in ETP, in EDP copies.
"""

from __future__ import annotations

import math
from typing import NamedTuple

# Slowest first: neighbours on the line differ in etp.
EXPERT_AXES = ("edp", "ep", "etp")


class ExpertCoordinates(NamedTuple):
    """Where a rank stands among the experts of its stage, slowest axis first."""

    edp: int
    ep: int
    etp: int

    def __str__(self) -> str:
        """Short form for messages, such as `edp0 ep1 etp0`."""
        return " ".join(f"{axis}{index}" for axis, index in zip(EXPERT_AXES, self, strict=True))


def default_etp(ep: int, tp: int) -> int:
    """Return the expert tensor parallel size of a grid for which none was said.

    Without expert parallelism experts are cut as all other layers are; with it they are whole.
    """
    return tp if ep == 1 else 1


def wrong_fold(ep: int, etp: int, *, tp: int, cp: int, dp: int) -> str | None:
    """Return the message for sizes that do not fold the ranks of a stage; None if they do."""
    if etp not in (1, tp):
        legal = "1" if tp == 1 else f"1 (whole experts) or the tp size {tp}"
        return f"etp size must be {legal}, got {etp}"
    ranks = tp * cp * dp
    if ranks % (ep * etp) == 0:
        return None
    near = ", ".join(map(str, nearest_divisors(ep, ranks // etp)))
    return (
        f"ep * etp = {ep} * {etp} must divide the ranks of a stage, tp * cp * dp = "
        f"{tp} * {cp} * {dp} = {ranks}; nearest legal ep sizes: {near}"
    )


def nearest_divisors(wanted: int, number: int, count: int = 3) -> list[int]:
    """Return the divisors of `number` that are `wanted` times the smallest factor, best first."""
    return sorted(divisors(number), key=lambda size: abs(math.log(size / wanted)))[:count]


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number, ascending."""
    small = [low for low in range(1, math.isqrt(number) + 1) if number % low == 0]
    return small + [number // low for low in reversed(small) if low * low != number]

"""Lists and numbers in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

RUNS = 4  # that a list of numbers shows


def listed(items: Sequence[str]) -> str:
    """Return 'a, b and c'."""
    return " and ".join(filter(None, (", ".join(items[:-1]), *items[-1:])))


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as '3', '0 and 1', '0-3, 6 and 8-11', '0, 2 ... 14', or some of them."""
    ordered = sorted(set(numbers))
    steps = {b - a for a, b in pairwise(ordered)}
    if len(ordered) > 3 and len(steps) == 1 and steps != {1}:
        return f"{ordered[0]}, {ordered[1]} ... {ordered[-1]}"
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [str(n) for n in ordered] if len(ordered) <= 3 and len(runs) != 1 else []
    if len(ordered) == 2:
        shown = [str(n) for n in ordered]
    shown = shown or [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    if len(shown) > RUNS:
        return f"{', '.join(shown[: RUNS - 1])} ... {shown[-1]} ({len(ordered)} of them)"
    return listed(shown)

"""The choice of tests for a mutant, with their order and time limits."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from .measure import Measured
from .places import AT_IMPORT, Place

PARAMETERS = 0.3  # s of delay in the order for each further case of a test function
ELSEWHERE = 1.0  # s of delay in the order for a test of another package
LEAST = 15.0  # s that every test may take
TIMES = 8.0  # further time, as a multiple of the measured time


def candidates(place: Place, measured: Measured) -> list[str]:
    """Return the tests that run the place, the most promising for their time first."""
    return _ordered(set(_reaching(place, measured)), measured, _package(place.file))


def _reaching(place: Place, measured: Measured) -> Iterable[str]:
    lines = measured.lines.get(place.file, {})
    if place.lines != AT_IMPORT:
        first, last = place.lines
        return (test for line in range(first, last + 1) for test in lines.get(line, ()))
    if lines:  # code at import matters to every test that runs a function of the file
        return (test for tests in lines.values() for test in tests)
    return (test for test in measured.seconds if _package(test) == _package(place.file))


def _package(path: str) -> str:
    return path.split("/")[1]


def _ordered(tests: set[str], measured: Measured, package: str) -> list[str]:
    """Sort by time; further cases of a function and other packages come later."""
    seen: dict[str, int] = {}
    costs: dict[str, float] = {}
    for test in sorted(tests, key=lambda test: (measured.seconds[test], test)):
        function = test.partition("[")[0]
        turn = seen[function] = seen.get(function, -1) + 1
        costs[test] = measured.seconds[test] + PARAMETERS * turn
        costs[test] += ELSEWHERE * (_package(test) != package)
    return sorted(costs, key=lambda test: (costs[test], test))


def within(tests: list[str], measured: Measured, budget: float) -> list[str]:
    """Return the first tests that take `budget` seconds together, at least one."""
    spent = accumulate(measured.seconds[test] for test in tests)
    return [
        test
        for n, (test, so_far) in enumerate(zip(tests, spent, strict=True))
        if n == 0 or so_far <= budget
    ]


def limits(tests: Iterable[str], measured: Measured) -> dict[str, float]:
    """Return for each test the seconds after which it counts as hanging."""
    return {test: LEAST + TIMES * measured.seconds[test] for test in tests}

"""Which tests are asked about a mutant, in which order, and how long each may take."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from .measure import Measured
from .places import AT_IMPORT, Place

PARAMETERS = 0.3  # s by which each further parameter of one test function comes later
ELSEWHERE = 1.0  # s by which a test of another package comes later
LEAST = 15.0  # s that a test may take, however fast it was
TIMES = 8.0  # and how many times what it took


def candidates(place: Place, measured: Measured) -> list[str]:
    """Return the tests that run the place, the most promising for their time first."""
    return _ordered(set(_reaching(place, measured)), measured, _package(place.file))


def _reaching(place: Place, measured: Measured) -> Iterable[str]:
    lines = measured.lines.get(place.file, {})
    if place.lines != AT_IMPORT:
        first, last = place.lines
        return (test for line in range(first, last + 1) for test in lines.get(line, ()))
    if lines:  # what runs at import matters to whoever runs a function of the file
        return (test for tests in lines.values() for test in tests)
    return (test for test in measured.seconds if _package(test) == _package(place.file))


def _package(path: str) -> str:
    return path.split("/")[1]


def _ordered(tests: set[str], measured: Measured, package: str) -> list[str]:
    """Sort by time, so that the parameters of one function and other packages wait a little."""
    seen: dict[str, int] = {}
    costs: dict[str, float] = {}
    for test in sorted(tests, key=lambda test: (measured.seconds[test], test)):
        function = test.partition("[")[0]
        turn = seen[function] = seen.get(function, -1) + 1
        costs[test] = measured.seconds[test] + PARAMETERS * turn
        costs[test] += ELSEWHERE * (_package(test) != package)
    return sorted(costs, key=lambda test: (costs[test], test))


def within(tests: list[str], measured: Measured, budget: float) -> list[str]:
    """Return the first tests that together took `budget` seconds, one at least."""
    spent = accumulate(measured.seconds[test] for test in tests)
    return [
        test
        for n, (test, so_far) in enumerate(zip(tests, spent, strict=True))
        if n == 0 or so_far <= budget
    ]


def limits(tests: Iterable[str], measured: Measured) -> dict[str, float]:
    """Return test → seconds after which it counts as hanging."""
    return {test: LEAST + TIMES * measured.seconds[test] for test in tests}

"""The verdict on one mutant: the test that notices it."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from .choose import limits
from .draw import Mutant
from .measure import Measured
from .worker import Worker

START = 60.0  # s for a fork to start and for pytest to load files, on a busy machine
AGAIN = 20.0  # least limit in s for the second run of a test that was late
TOTAL = 4.0  # limit of all tests together, as a multiple of their measured time
_LATE = ("did not finish", "timed out", "Timeout")  # in messages of failures that load may cause


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a mutant.

    Attributes:
        verdict: "caught", "survived" or "not run".
        by: Test that caught it.
        how: "failed", "hangs" or "dies".
        asked: Number of tests that ran, or were to run until one failed.
    """

    verdict: str
    by: str = ""
    how: str = ""
    asked: int = 0
    text: str = ""

    def data(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return asdict(self)


def judge(worker: Worker, mutant: Mutant, tests: list[str], measured: Measured) -> Verdict:
    """Run tests against a mutant until one fails.

    A test that fails only by its time is run again: without the mutant, then with it for six times
    as long. So load on the machine does not count as a catch.
    """
    rest = tests
    while rest:
        found = _with(worker, mutant, limits(rest, measured), measured)
        if found.verdict == "caught" and found.how != "failed":
            found = _again(worker, mutant, found, measured)
        if found.verdict == "caught":
            return found
        rest = rest[rest.index(found.by) + 1 :] if found.by in rest else []
    return Verdict("survived", asked=len(tests))


def _again(worker: Worker, mutant: Mutant, found: Verdict, measured: Measured) -> Verdict:
    """Run a late test again; it is no catch if it also fails without the mutant."""
    control, taken = _ask(worker, {found.by: 10 * limits([found.by], measured)[found.by]}, measured)
    if control.verdict != "survived":
        return Verdict("survived", found.by)
    again = _with(worker, mutant, {found.by: max(AGAIN, 6 * taken)}, measured)
    return replace(again, by=found.by)


def _with(worker: Worker, mutant: Mutant, tests: dict[str, float], measured: Measured) -> Verdict:
    with Planted(worker.folder, mutant):
        return _ask(worker, tests, measured)[0]


def _ask(worker: Worker, tests: dict[str, float], measured: Measured) -> tuple[Verdict, float]:
    """Run tests on the current sources; return the verdict, and the seconds of the tests."""
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    usual = sum(measured.seconds.get(test, 0.0) for test in tests)
    limit = START + max(TOTAL * usual, max(tests.values()) + usual)
    events, ended = worker.ask(files, limit, tests=tests)
    return _read(events, ended, tests), sum(e.get("seconds", 0.0) for e in events if "ended" in e)


def _read(events: list[dict[str, Any]], ended: bool, tests: dict[str, float]) -> Verdict:
    """Return the verdict that events mean."""
    began = [event["began"] for event in events if "began" in event]
    last = began[-1] if began else next(iter(tests))
    for event in events:
        if "failed" in event:
            late = event["late"] or any(word in event["text"] for word in _LATE)
            by = event["failed"] if event["failed"] in tests or not late else last
            how = "hangs" if late else "failed"
            return Verdict("caught", by, how, len(began), event["text"])
    statuses = [event["status"] for event in events if "status" in event]
    unloaded = not began and statuses == [pytest.ExitCode.USAGE_ERROR]  # a conftest cannot import
    if not ended or not statuses or unloaded:
        return Verdict("caught", last, "hangs" if not ended else "dies", len(began))
    if len(began) < len(tests):
        raise RuntimeError(f"{len(tests) - len(began)} of {len(tests)} tests were not found")
    return Verdict("survived", asked=len(began))


class Planted:
    """A context with a mutant in a copy of the sources."""

    def __init__(self, folder: Path, mutant: Mutant) -> None:
        self.path = folder / mutant.place.file
        self.mutant = mutant
        self.source = self.path.read_bytes()
        self.times = self.path.stat()

    def __enter__(self) -> None:
        """Write the changed source, with a file time that no cached bytecode has."""
        self.path.write_bytes(self.mutant.apply(self.source))
        moment = 10**9 + self.mutant.number
        os.utime(self.path, (moment, moment))

    def __exit__(self, *_: object) -> None:
        """Restore the source."""
        self.path.write_bytes(self.source)
        os.utime(self.path, ns=(self.times.st_atime_ns, self.times.st_mtime_ns))

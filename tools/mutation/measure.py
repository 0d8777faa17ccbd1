"""Measurements, once for a commit: each test's time without a mutant, and the lines it runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import recorder, tree
from .worker import Worker

LIMIT = 900.0  # s for the tests of one file, measured


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of the tests of all files.

    Attributes:
        seconds: Test → its time; only tests that pass alone.
        failed: Tests that fail or hang without a mutant; they are never asked.
        lines: File → line → tests that run it.
    """

    seconds: dict[str, float]
    failed: list[str]
    lines: dict[str, dict[int, list[str]]]


def waiting(folder: Path, out: Path) -> list[str]:
    """Return the test files of a tree that `out` has no measurement of."""
    return [file for file in tree.tests(folder) if not _place(out, file).exists()]


def measure(worker: Worker, file: str, out: Path) -> None:
    """Run the tests of one file and write down the measurements."""
    place = _place(out, file)
    record = worker.folder / ".mutation" / "records" / place.stem
    recorder.prepare(record, tree.sources(worker.folder))
    events, ended = worker.ask([file], LIMIT, record=str(record))
    if ended and not any("status" in event for event in events):
        raise RuntimeError(f"pytest did not run {file}: see {worker.folder}/.mutation/report.log")
    found = _gather(events, ended, recorder.read(record))
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_suffix(".part")
    temporary.write_text(json.dumps(found))
    temporary.rename(place)


def _place(out: Path, file: str) -> Path:
    return out / "measured" / f"{Path(file).stem}.json"


def _gather(
    events: list[dict[str, Any]], ended: bool, ran: dict[int, dict[str, set[int]]]
) -> dict[str, Any]:
    """Combine the reports and records of one file's tests."""
    numbers = {e["began"]: e["number"] for e in events if "began" in e}
    failed = {e["failed"] for e in events if "failed" in e}
    seconds = {e["ended"]: e["seconds"] for e in events if "ended" in e}
    if not ended:  # the test that hung
        failed |= set(numbers) - set(seconds)
    good = {test: taken for test, taken in seconds.items() if test not in failed}
    lines = {
        test: {file: sorted(of) for file, of in ran.get(numbers[test], {}).items()} for test in good
    }
    return {"seconds": good, "failed": sorted(failed), "lines": lines}


def load(out: Path) -> Measured:
    """Read all measurements."""
    measured = Measured({}, [], {})
    for place in sorted((out / "measured").glob("*.json")):
        found = json.loads(place.read_text())
        measured.seconds.update(found["seconds"])
        measured.failed.extend(found["failed"])
        for test, files in found["lines"].items():
            for file, lines in files.items():
                for line in lines:
                    measured.lines.setdefault(file, {}).setdefault(line, []).append(test)
    return measured

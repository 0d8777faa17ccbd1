"""New tests of the working tree against mutants that survived."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace

from . import measure, tree
from .draw import Mutant, all_places, draw
from .hunt import Hunt, sentence
from .verdict import Verdict, judge
from .worker import Worker

ROUND = 9  # number in the results: after all rounds of the hunt
LIMIT = 600.0  # s for all tests without a mutant


def again(hunt: Hunt, numbers: list[int], tests: list[str], say: Callable[[str], None]) -> None:
    """Judge mutants of a hunt by test files, or tests in them, and append the results.

    Raises:
        ValueError: The tests do not pass without a mutant.
    """
    known = json.loads((hunt.out / "hunt.json").read_text())
    hunt = replace(hunt, **known)
    folder = tree.make(hunt.root, hunt.commit, hunt.out / "tree-again")
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    for name in files:
        shutil.copy(hunt.root / name, folder / name)
    mutants = draw(all_places(folder, tree.sources(folder)), hunt.seed, max(numbers))
    worker = Worker(folder, hunt.niceness)
    try:
        measured = control(worker, files, tests)
        for number in numbers:
            say(_one(hunt, worker, mutants[number - 1], measured))
    finally:
        worker.close()


def control(worker: Worker, files: list[str], tests: list[str]) -> measure.Measured:
    """Run the tests without a mutant.

    Raises:
        ValueError: A test fails, is skipped or does not exist, so it could catch nothing.
    """
    events, ended = worker.ask(files, LIMIT, only=tests)
    failed = [event for event in events if "failed" in event]
    skipped = {event["skipped"]: event["text"] for event in events if "skipped" in event}
    ran = {e["ended"]: e["seconds"] for e in events if "ended" in e and e["ended"] not in skipped}
    silent = [test for test in tests if not any(is_of(name, test) for name in ran)]
    if failed or silent or not ended:
        raise ValueError(
            f"without a mutant these tests fail: {failed}; these run not at all: {silent}, skipped "
            f"{skipped}; see {worker.folder / '.mutation' / 'report.log'}"
        )
    return measure.Measured(ran, [], {})


def is_of(test: str, name: str) -> bool:
    """Return whether a test has a name, is a case of it, or is in the file of that name."""
    return test == name or test.startswith((f"{name}[", f"{name}::"))


def _one(hunt: Hunt, worker: Worker, mutant: Mutant, measured: measure.Measured) -> str:
    began = time.monotonic()
    names = list(measured.seconds)
    verdict: Verdict = judge(worker, mutant, names, measured)
    seconds = round(time.monotonic() - began, 1)
    line = {**mutant.data(), **verdict.data(), "of": len(names), "round": ROUND, "seconds": seconds}
    with hunt.results.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return sentence(line)

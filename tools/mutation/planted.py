"""Faults of known kinds, put into the sources one at a time; each has a test that must fail."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from . import tree
from .again import control, is_of
from .draw import Mutant
from .hunt import Hunt
from .places import Place
from .verdict import Verdict, judge
from .worker import Worker

FOLDER = Path(__file__).with_name("plants")


@dataclass(frozen=True, slots=True)
class Plant:
    """One fault.

    Attributes:
        name: Name of the fault.
        fault: The fault in one line.
        file: Source file to change.
        before: Text that occurs in it once.
        after: Replacement of the text.
        test: Test that must fail, or a function with a case that must fail.
    """

    name: str
    fault: str
    file: str
    before: str
    after: str
    test: str

    def mutant(self, root: Path) -> Mutant:
        """Return the change of a tree's source.

        Raises:
            ValueError: The text does not occur exactly once.
        """
        source = (root / self.file).read_bytes()
        text = self.before.encode()
        if source.count(text) != 1:
            raise ValueError(f"{self.name}: {self.file} has its text {source.count(text)} times")
        start = source.index(text)
        line = source.count(b"\n", 0, start) + 1
        place = Place(self.file, line, "plant", start, start + len(text), self.before, (), (0, 0))
        return Mutant(line, place, self.after)


def plants() -> list[Plant]:
    """Read all plants."""
    return [
        Plant(name, **told)
        for path in sorted(FOLDER.glob("*.toml"))
        for name, told in tomllib.loads(path.read_text()).items()
    ]


def hunt(given: Hunt, names: Iterable[str], say: Callable[[str], None]) -> bool:
    """Plant faults in a commit's sources, one at a time; return whether their tests catch all.

    Args:
        given: Hunt with the commit; results are reported and not kept.
        names: Names of faults; all if empty.
        say: Called with a line for each fault.

    Raises:
        ValueError: A text does not occur, or a test fails without a fault or does not run.
    """
    wanted = set(names)
    chosen = [each for each in plants() if not wanted or each.name in wanted]
    folder = tree.make(given.root, given.commit, given.out / "tree-planted")
    mutants = [each.mutant(folder) for each in chosen]
    worker = Worker(folder, given.niceness)
    caught = 0
    try:
        tests = list(dict.fromkeys(each.test for each in chosen))
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        measured = control(worker, files, tests)
        for plant, mutant in zip(chosen, mutants, strict=True):
            asked = [test for test in measured.seconds if is_of(test, plant.test)]
            verdict: Verdict = judge(worker, mutant, asked, measured)
            caught += verdict.verdict == "caught"
            fate = f"{verdict.verdict} ({verdict.how})" if verdict.how else "SURVIVES"
            say(f"{fate:18}{plant.name}: {' '.join(verdict.text.split())[-160:]}")
    finally:
        worker.close()
    say(f"{caught} of {len(chosen)} planted faults caught")
    return caught == len(chosen)


def to_markdown(given: Iterable[Plant]) -> str:
    """Return a table of faults with the test that catches each."""
    rows = [f"| {each.name} | {each.fault} | `{short(each.test)}` |" for each in given]
    return "\n".join(["| planted | fault | test |", "| --- | --- | --- |", *rows]) + "\n"


def short(test: str) -> str:
    """Return a test's name without the folders of its file."""
    return test.rpartition("/")[2]

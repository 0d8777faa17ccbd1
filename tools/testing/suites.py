"""Run each package's tests with only its own wheel and those it needs installed.

`python -m tools.testing` tests every package and the tests across packages (`tests/`, with all
packages): the longest suites first, then those that the last change concerns (see `changed.py`).
`python -m tools.testing scaletorch-tp` tests one. `--coverage` shows how many lines of each package
its tests run, and fails below a bound; other words that begin with `-` go to pytest. Three suites
run in parallel, since ranks that wait for each other leave cores idle, and the longest are split;
their output is then shown when they end. On a machine that says what it has, a test that skips for
lack of it fails its suite (`skips.py`).

Each run gets a fresh virtual environment that borrows third-party libraries from the running
interpreter through a `.pth` file, so that torch is not installed again. The running environment's
editable packages stay invisible, since `.pth` files of a borrowed folder are not read.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from ..building import build
from ..environments import OUTSIDE, create, install, libraries, site_packages
from ..packages import PACKAGES, ROOT, closure, folder
from . import changed, covered, skips
from .covered import Covered

EVERYTHING = changed.CROSSING
SIDE_BY_SIDE = 3
# Number of splits of a suite that takes so long that the end would wait for it alone.
PARTS = {"scaletorch-dist": 2, "scaletorch": 4}
LONGEST = (EVERYTHING, "scaletorch-dist", "scaletorch")  # at the end nothing else runs


@dataclass(frozen=True)
class Suite:
    """The tests of one package, or those across packages, and an environment for them."""

    target: str
    python: Path
    measuring: list[str]
    part: int = 0
    parts: int = 1

    @property
    def name(self) -> str:
        """Name in the output."""
        return self.target if self.parts == 1 else f"{self.target} {self.part + 1}/{self.parts}"

    @property
    def tests(self) -> list[Path]:
        """The folder of its tests, or its share of the files there."""
        tests = ROOT / EVERYTHING if self.target == EVERYTHING else folder(self.target) / "tests"
        if self.parts == 1:
            return [tests]
        return sorted(tests.rglob("test_*.py"))[self.part :: self.parts]

    def split(self) -> list[Suite]:
        """Return the splits of the suite."""
        parts = PARTS.get(self.target, 1)
        return [replace(self, part=part, parts=parts) for part in range(parts)]

    def run(self, options: list[str], quietly: bool) -> bool:
        """Run the tests; return whether they passed and no test skipped that must not.

        Args:
            options: Arguments for pytest.
            quietly: Whether to show the output at the end instead of immediately.
        """
        files, begin = [str(path.relative_to(ROOT)) for path in self.tests], time.monotonic()
        print(f"\n=== {self.name}: {files[0]} begin", flush=True)
        beside = self.python.parent.parent
        report, log = (beside / f"tests-{self.part}.{form}" for form in ("xml", "log"))
        command = [str(self.python), *self.measuring, "-m", "pytest", "-q", *files]
        command += [f"--junitxml={report}", "--durations=10", *options]
        with log.open("w") as file:
            to = file if quietly else None
            done = subprocess.run(command, cwd=ROOT, env=OUTSIDE, check=False, stdout=to, stderr=to)
        wrong = skips.forbidden(skips.skipped(report), os.environ.get(skips.VARIABLE))
        passed = done.returncode == 0 and not wrong
        lines = [log.read_text(errors="replace"), *wrong]
        lines.append(f"=== {self.name}: {'passed' if passed else 'FAILED'}")
        lines[-1] += f" in {time.monotonic() - begin:.0f} s"
        print("\n".join(filter(None, lines)), flush=True)
        return passed


def prepare(target: str, wheels: list[Path], scratch: Path, measure: bool) -> Suite:
    """Create an environment with these wheels, and the start of coverage."""
    python = create(scratch / target, libraries(), covered.START)
    site = site_packages(scratch / target)
    shutil.copy(covered.START_MODULE, site)
    install(python, wheels)
    measured = measure and target != EVERYTHING
    return Suite(target, python, covered.measuring(target, site) if measured else [])


def run(targets: list[str], options: list[str], measure: bool) -> tuple[list[str], list[Covered]]:
    """Run the suites; return the failed ones and the measured coverage."""
    with tempfile.TemporaryDirectory(prefix="scaletorch-alone-") as scratch:
        needed = {t: PACKAGES if t == EVERYTHING else closure(t) for t in targets}
        every = sorted(set().union(*needed.values()))
        (into := Path(scratch, "wheels")).mkdir()
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            built = pool.map(lambda name: build(folder(name), into), every)
            wheels = dict(zip(every, built, strict=True))
            installed = {t: [wheels[name] for name in needed[t]] for t in targets}
            suites = [
                *pool.map(lambda t: prepare(t, installed[t], Path(scratch), measure), targets)
            ]
            # Alternate packages: splits of one package wait for the same things, with idle cores.
            parts = sorted((p for suite in suites for p in suite.split()), key=_turn)
            passed = [*pool.map(lambda part: part.run(options, len(parts) > 1), parts)]
        failed = {part.target for part, good in zip(parts, passed, strict=True) if not good}
        measured = [s.target for s in suites if s.measuring]
        results = [covered.collect(name, site_packages(Path(scratch, name))) for name in measured]
        return [name for name in targets if name in failed], results


def _turn(part: Suite) -> int:
    return part.part if part.parts > 1 or part.target == EVERYTHING else max(PARTS.values())


def in_order(first: list[str]) -> list[str]:
    """Return all suites: the longest, then those that a change concerns, then the others."""
    suites = [*first, *(name for name in changed.SUITES if name not in first)]
    long = {name: place - len(LONGEST) for place, name in enumerate(LONGEST)}
    return sorted(suites, key=lambda name: (long.get(name, 0), name not in first))


def main(arguments: list[str]) -> int:
    """Test the named suites, or everything; return 1 if anything failed."""
    measure = "--coverage" in arguments
    options = [a for a in arguments if a.startswith("-") and a != "--coverage"]
    everything = in_order(changed.suites_since())
    targets = [a for a in arguments if not a.startswith("-")] or everything
    if unknown := set(targets) - {*changed.SUITES}:
        print(f"unknown: {sorted(unknown)}; one of {changed.SUITES}", file=sys.stderr)
        return 2
    print("in this order:", *targets)
    failed, results = run(targets, options, measure)
    if results:
        print(covered.table(results))
    print(f"\n{len(targets) - len(failed)} of {len(targets)} suites passed", *failed, flush=True)
    return int(bool(failed) or any(one.percent < covered.BOUND for one in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

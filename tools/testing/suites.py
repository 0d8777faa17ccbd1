"""Run each package's tests with only its own wheel and those it needs installed.

``python -m tools.testing`` tests every package and what crosses packages (``tests/``, with all
of them), first what the last change concerns (see ``changed.py``), and what takes long;
``python -m tools.testing scaletorch-tp`` tests one. ``--coverage`` shows how many lines of each
package its tests run, and fails below a bound; other words that begin with ``-`` go to pytest.
Two suites run side by side, since one alone leaves the cores idle half of the time; what a suite
prints is then shown when it ends. Where the machine says what it has, a test that skips for want
of it fails its suite (``skips.py``).

Each run gets a fresh virtual environment that borrows third-party libraries from the running
interpreter's through a ``.pth`` file, so that torch is not installed again. The running
environment's editable packages stay invisible, since a borrowed folder's own ``.pth`` files are
not read.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..building import build
from ..environments import OUTSIDE, create, install, libraries, site_packages
from ..packages import PACKAGES, ROOT, closure, folder
from . import changed, covered, skips
from .covered import Covered

EVERYTHING = changed.CROSSING
SIDE_BY_SIDE = 2
LONGEST = ("scaletorch", "scaletorch-dist", EVERYTHING)  # beside the last one nothing runs


@dataclass(frozen=True)
class Suite:
    """The tests of one package, or those that cross packages, and an environment for them."""

    target: str
    python: Path
    measuring: list[str]

    @property
    def folder(self) -> Path:
        """Where its environment is."""
        return self.python.parent.parent

    def run(self, options: list[str], quietly: bool) -> bool:
        """Run the tests; tell whether they passed and none skipped that must not.

        Args:
            options: Words for pytest.
            quietly: Show what they print when they have ended, not at once.
        """
        tests = ROOT / EVERYTHING if self.target == EVERYTHING else folder(self.target) / "tests"
        print(f"\n=== {self.target}: {tests.relative_to(ROOT)} begin", flush=True)
        report, log, begin = self.folder / "tests.xml", self.folder / "tests.log", time.monotonic()
        command = [str(self.python), *self.measuring, "-m", "pytest", "-q", str(tests)]
        command += [f"--junitxml={report}", *options]
        with log.open("w") as file:
            to = file if quietly else None
            done = subprocess.run(command, cwd=ROOT, env=OUTSIDE, check=False, stdout=to, stderr=to)
        wrong = skips.forbidden(skips.skipped(report), os.environ.get(skips.VARIABLE))
        passed = done.returncode == 0 and not wrong
        lines = [log.read_text(errors="replace"), *wrong]
        lines.append(f"=== {self.target}: {'passed' if passed else 'FAILED'}")
        lines[-1] += f" in {time.monotonic() - begin:.0f} s"
        print("\n".join(filter(None, lines)), flush=True)
        return passed


def prepare(target: str, wheels: list[Path], scratch: Path, measure: bool) -> Suite:
    """Make an environment with these wheels, and what coverage needs."""
    python = create(scratch / target, libraries(), covered.START)
    site = site_packages(scratch / target)
    shutil.copy(covered.START_MODULE, site)
    install(python, wheels)
    measured = measure and target != EVERYTHING
    return Suite(target, python, covered.measuring(target, site) if measured else [])


def run(targets: list[str], options: list[str], measure: bool) -> tuple[list[str], list[Covered]]:
    """Run the suites; return those that failed, and what was measured."""
    with tempfile.TemporaryDirectory(prefix="scaletorch-alone-") as scratch:
        needed = {t: PACKAGES if t == EVERYTHING else closure(t) for t in targets}
        every = sorted(set().union(*needed.values()))
        wheels = {name: build(folder(name), Path(scratch, "wheels")) for name in every}
        suites = [
            prepare(t, [wheels[name] for name in needed[t]], Path(scratch), measure)
            for t in targets
        ]
        with ThreadPoolExecutor(min(SIDE_BY_SIDE, len(suites))) as pool:
            passed = [*pool.map(lambda suite: suite.run(options, len(suites) > 1), suites)]
        failed = [suite.target for suite, good in zip(suites, passed, strict=True) if not good]
        measured = [s for s in suites if s.measuring]
        return failed, [covered.collect(s.target, site_packages(s.folder)) for s in measured]


def in_order(first: list[str]) -> list[str]:
    """Return all suites, those that a change concerns before others, and long ones before short."""
    suites = [*first, *(name for name in changed.SUITES if name not in first)]
    long = {name: place - len(LONGEST) for place, name in enumerate(LONGEST)}
    return sorted(suites, key=lambda name: (name not in first, long.get(name, 0)))


def main(arguments: list[str]) -> int:
    """Test what was named, or everything; 1 if anything failed."""
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

"""Run each package's tests with only its own wheel and those it needs installed.

``python tools/test_alone.py`` tests every package and what crosses packages (``tests/``, with all
of them), first what the last change concerns (see ``changed.py``);
``python tools/test_alone.py scaletorch-tp`` tests one. ``--coverage`` shows how many lines of each
package its tests run, and fails below a bound; other words that begin with ``-`` go to pytest.

Each run gets a fresh virtual environment that borrows third-party libraries from the running
interpreter's through a ``.pth`` file, so that torch is not installed again. The running
environment's editable packages stay invisible, since a borrowed folder's own ``.pth`` files are
not read.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import changed
import covered
from building import build
from covered import Covered
from environments import OUTSIDE, create, install, libraries, site_packages
from packages import PACKAGES, ROOT, closure, folder

EVERYTHING = changed.CROSSING


def run_tests(target: str, python: Path, options: list[str], measuring: list[str]) -> bool:
    """Run the tests of one package, or those that cross packages; tell whether they passed."""
    tests = ROOT / EVERYTHING if target == EVERYTHING else folder(target) / "tests"
    print(f"\n=== {target}: {tests.relative_to(ROOT)}", flush=True)
    command = [str(python), *measuring, "-m", "pytest", "-q", str(tests), *options]
    return subprocess.run(command, cwd=ROOT, env=OUTSIDE, check=False).returncode == 0


def run(targets: list[str], options: list[str], measure: bool) -> tuple[list[str], list[Covered]]:
    """Run the suites; return those that failed, and what was measured."""
    failed, results = [], []
    with tempfile.TemporaryDirectory(prefix="scaletorch-alone-") as scratch:
        needed = {t: PACKAGES if t == EVERYTHING else closure(t) for t in targets}
        every = sorted(set().union(*needed.values()))
        wheels = {name: build(folder(name), Path(scratch, "wheels")) for name in every}
        for target in targets:
            python = create(Path(scratch, target), libraries(), covered.START)
            site = site_packages(Path(scratch, target))
            shutil.copy(covered.START_MODULE, site)
            install(python, [wheels[name] for name in needed[target]])
            measured = measure and target != EVERYTHING
            measuring = covered.measuring(target, site) if measured else []
            if not run_tests(target, python, options, measuring):
                failed.append(target)
            if measured:
                results.append(covered.collect(target, site))
    return failed, results


def main(arguments: list[str]) -> int:
    """Test what was named, or everything; 1 if anything failed."""
    measure = "--coverage" in arguments
    options = [a for a in arguments if a.startswith("-") and a != "--coverage"]
    first = changed.suites_since()
    everything = [*first, *(name for name in changed.SUITES if name not in first)]
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

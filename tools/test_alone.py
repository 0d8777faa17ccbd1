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

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

import changed
import covered
from covered import Covered
from packages import PACKAGES, ROOT, closure

EVERYTHING = changed.CROSSING


def site_packages(folder: Path) -> Path:
    """Return where an environment keeps what is installed in it."""
    variables = {"base": str(folder), "platbase": str(folder)}
    return Path(sysconfig.get_path("purelib", vars=variables))


def install(packages: list[str], folder: Path, wheels: Path) -> Path:
    """Make an environment with the wheels of ``packages`` alone; return its python."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    borrowed = [sysconfig.get_path("purelib"), covered.START]
    (site_packages(folder) / "borrowed.pth").write_text("\n".join(borrowed))
    shutil.copy(covered.START_MODULE, site_packages(folder))
    built = [str(next(wheels.glob(f"{name.replace('-', '_')}-*.whl"))) for name in packages]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-index"]
    subprocess.run([*pip, "--no-deps", *built], check=True)
    return python


def build(packages: list[str], wheels: Path) -> None:
    """Build the wheels of ``packages``."""
    for name in packages:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
        subprocess.run(command, cwd=ROOT / "packages" / name, check=True, capture_output=True)


def run_tests(target: str, python: Path, options: list[str], measuring: list[str]) -> bool:
    """Run the tests of one package, or those that cross packages; tell whether they passed."""
    folder = ROOT / EVERYTHING if target == EVERYTHING else ROOT / "packages" / target / "tests"
    print(f"\n=== {target}: {folder.relative_to(ROOT)}", flush=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [str(python), *measuring, "-m", "pytest", "-q", str(folder), *options]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def run(targets: list[str], options: list[str], measure: bool) -> tuple[list[str], list[Covered]]:
    """Run the suites; return those that failed, and what was measured."""
    failed, results = [], []
    with tempfile.TemporaryDirectory(prefix="scaletorch-alone-") as scratch:
        needed = {t: PACKAGES if t == EVERYTHING else closure(t) for t in targets}
        wheels = Path(scratch, "wheels")
        build(sorted(set().union(*needed.values())), wheels)
        for target in targets:
            folder = Path(scratch, target)
            python = install(needed[target], folder, wheels)
            measured = measure and target != EVERYTHING
            measuring = covered.measuring(target, site_packages(folder)) if measured else []
            if not run_tests(target, python, options, measuring):
                failed.append(target)
            if measured:
                results.append(covered.collect(target, site_packages(folder)))
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

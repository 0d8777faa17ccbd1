"""Run each package's tests with only its own wheel and those it needs installed.

``python tools/test_alone.py`` tests every package, then what crosses packages (``tests/``) with
all of them; ``python tools/test_alone.py scaletorch-tp`` tests one. Words after the packages that
begin with ``-`` go to pytest.

Each run gets a fresh virtual environment that borrows third-party libraries from the running
interpreter's through a ``.pth`` file, so that torch is not installed again. The running
environment's editable packages stay invisible, since a borrowed folder's own ``.pth`` files are
not read.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

from packages import PACKAGES, ROOT, closure

EVERYTHING = "tests"


def install(packages: list[str], folder: Path, wheels: Path) -> Path:
    """Make an environment with the wheels of ``packages`` alone; return its python."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    variables = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", vars=variables))
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    built = [str(next(wheels.glob(f"{name.replace('-', '_')}-*.whl"))) for name in packages]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-index"]
    subprocess.run([*pip, "--no-deps", *built], check=True)
    return python


def build(packages: list[str], wheels: Path) -> None:
    """Build the wheels of ``packages``."""
    for name in packages:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
        subprocess.run(command, cwd=ROOT / "packages" / name, check=True, capture_output=True)


def run_tests(target: str, python: Path, options: list[str]) -> bool:
    """Run the tests of one package, or those that cross packages; tell whether they passed."""
    folder = ROOT / EVERYTHING if target == EVERYTHING else ROOT / "packages" / target / "tests"
    print(f"\n=== {target}: {folder.relative_to(ROOT)}", flush=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [str(python), "-m", "pytest", "-q", str(folder), *options]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def main(arguments: list[str]) -> int:
    """Test what was named, or everything; 1 if anything failed."""
    options = [a for a in arguments if a.startswith("-")]
    targets = [a for a in arguments if not a.startswith("-")] or [*PACKAGES, EVERYTHING]
    if unknown := set(targets) - {*PACKAGES, EVERYTHING}:
        print(f"unknown: {sorted(unknown)}; one of {[*PACKAGES, EVERYTHING]}", file=sys.stderr)
        return 2
    failed = []
    with tempfile.TemporaryDirectory(prefix="scaletorch-alone-") as scratch:
        needed = {t: PACKAGES if t == EVERYTHING else closure(t) for t in targets}
        wheels = Path(scratch, "wheels")
        build(sorted(set().union(*needed.values())), wheels)
        for target in targets:
            python = install(needed[target], Path(scratch, target), wheels)
            if not run_tests(target, python, options):
                failed.append(target)
    print(f"\n{len(targets) - len(failed)} of {len(targets)} suites passed", *failed, flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Check each wheel in isolation: build, open, install, import, try and rebuild every one.

Extras are resolved from the package index that pip is set to. Prints a table; returns 1 if anything
in it is wrong.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ..building import build
from ..environments import create, install, libraries, torch_alone
from ..packages import PACKAGES, closure, folder, requirements
from ..rows import CheckError, Row, row, table
from .alone import Alone
from .files import no_shared_paths, own_files
from .metadata import own_words
from .next_series import build_next, refuses
from .sdists import sdist, tests


def check(packages: list[str], with_tests: bool = False) -> list[Row]:
    """Check the wheels of the packages."""
    with tempfile.TemporaryDirectory(prefix="scaletorch-wheels-") as name:
        scratch = Path(name)
        wheels = {package: build(folder(package), scratch / "wheels") for package in PACKAGES}
        build_next(PACKAGES, scratch / "next")
        torch_alone(scratch / "torch")
        one = partial(check_package, scratch=scratch, wheels=wheels, with_tests=with_tests)
        rows: list[Row] = []
        with ThreadPoolExecutor(1 if with_tests else 2) as pool:  # tests take all cores
            for package, found in zip(packages, pool.map(one, packages), strict=True):
                print(f"{package}: {len(found)} checks done", file=sys.stderr, flush=True)
                rows += found
        files = [*wheels.values(), *scratch.glob("*/sdist/*.tar.gz")]
        rows.append(row("all wheels: paths", lambda: no_shared_paths(wheels.values())))
        return [*rows, row("all wheels: twine", lambda: twine(files))]


def check_package(
    package: str, scratch: Path, wheels: dict[str, Path], with_tests: bool
) -> list[Row]:
    """Check one wheel: as a file, installed, and rebuilt."""
    wheel, own = wheels[package], scratch / package
    alone = Alone(package, wheel, wheel.parent, create(own / "alone", scratch / "torch"))
    checks = {
        "files": lambda: own_files(wheel, package),
        "metadata": lambda: own_words(wheel, package),
        "install": alone.install,
        "import": alone.imports,
        "README": alone.readme,
        "extras": alone.extras,
        "sdist": lambda: sdist(package, wheel, own / "sdist"),
    }
    if requirements(package):
        checks["other series"] = lambda: refuses(alone, scratch / "next")
    if with_tests:
        python = create(own / "all", libraries())
        install(python, [wheels[each] for each in closure(package)])
        checks["tests"] = lambda: tests(package, python, own / "tests")
    return [row(f"{package}: {what}", each) for what, each in checks.items()]


def twine(files: Iterable[Path]) -> str:
    """Check with twine whether an index would accept the files."""
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckError(f"{done.stdout}{done.stderr}")
    return f"{done.stdout.count('PASSED')} wheels and sdists pass `twine check --strict`"


def asked(words: list[str]) -> tuple[list[str], bool]:
    """Return the requested packages, and whether to run their tests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", help="those to check, else every one")
    parser.add_argument(
        "--tests",
        action="store_true",
        help="run each package's tests too, from its unpacked sdist: many minutes",
    )
    arguments = parser.parse_args(words)
    if unknown := sorted(set(arguments.packages) - set(PACKAGES)):
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(PACKAGES)}")
    return arguments.packages or PACKAGES, arguments.tests


def main() -> int:
    """Print the table of all checks."""
    rows = check(*asked(sys.argv[1:]))
    print(table(rows), flush=True)
    return int(not all(ok for *_, ok in rows))


if __name__ == "__main__":
    sys.exit(main())

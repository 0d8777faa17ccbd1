"""The sdist of a package: it builds the same wheel, and its tests run."""

from __future__ import annotations

import re
from pathlib import Path

from ..building import build, unpack
from ..environments import run
from ..packages import folder
from ..rows import CheckError


def sdist(package: str, wheel: Path, into: Path) -> str:
    """Build the sdist, and from it alone a wheel, which must equal `wheel` byte for byte."""
    copy = unpacked(package, into)
    again = build(copy, into)
    if again.name != wheel.name or again.read_bytes() != wheel.read_bytes():
        raise CheckError(f"the wheel of the sdist, {again.name}, is another")
    if missing := test_files(folder(package)) - test_files(copy):
        raise CheckError(f"the sdist lacks {', '.join(sorted(map(str, missing)))}")
    return f"its wheel is the same to the byte; holds {len(test_files(copy))} files of tests"


def unpacked(package: str, into: Path) -> Path:
    """Build a package's sdist and unpack it into a folder; return the unpacked folder."""
    into.mkdir()
    return unpack(build(folder(package), into, "sdist"), into)


def test_files(source: Path) -> set[Path]:
    """Return the relative paths of test files below a package's folder."""
    tests = (path for path in (source / "tests").rglob("*") if path.is_file())
    return {p.relative_to(source) for p in tests if p.parent.name != "__pycache__"}


def tests(package: str, python: Path, into: Path) -> str:
    """Run the tests of the unpacked sdist, as a user with only the sdist would."""
    done = run(python, "-m", "pytest", "-q", "tests", folder=unpacked(package, into), limit=3600)
    if done.returncode:
        raise CheckError(f"{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return re.sub(r"\S*=+\S*", "", done.stdout.strip().splitlines()[-1]).strip()

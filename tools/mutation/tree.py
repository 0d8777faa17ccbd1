"""Copies of one commit of the repository, one for each worker, in which sources are changed."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
from pathlib import Path

from . import scope

TOOLS = Path(__file__).resolve().parent.parent
START = """
import os

if "MUTATION_RECORD" in os.environ:
    from mutation import recorder

    recorder.start()
"""


def make(root: Path, commit: str, folder: Path) -> Path:
    """Copy a commit of the repository at `root` into a new folder; return the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "archive", "--format=tar", commit], cwd=root, capture_output=True, check=True
    ).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    start = folder / ".mutation"
    start.mkdir()
    (start / "sitecustomize.py").write_text(START)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Return the environment in which Python finds the copy's sources and this tool."""
    paths = [*sorted(folder.glob("packages/*/src")), folder / ".mutation", TOOLS, folder / "tools"]
    own = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "MUTATION_TREE": str(folder)}
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "TMPDIR": str(temporary(folder))}
    return {
        **os.environ,
        **own,
        **fixed,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


def temporary(folder: Path) -> Path:
    """Return the folder for temporary files of the copy's tests."""
    return folder / ".mutation" / "tmp"


def sources(folder: Path) -> list[str]:
    """Return the files that may be mutated, as paths below the folder."""
    found: list[Path] = []
    for name in scope.SOURCES:
        place = folder / name
        found += [place] if place.is_file() else place.rglob("*.py")
    names = sorted(path.relative_to(folder).as_posix() for path in found)
    return [name for name in names if not _matches(name, scope.FILES_LEFT_OUT)]


def tests(folder: Path) -> list[str]:
    """Return the test files that are asked, as paths below the folder."""
    names = sorted(
        p.relative_to(folder).as_posix() for p in folder.glob("packages/*/tests/test_*.py")
    )
    return [name for name in names if not _matches(name, scope.TESTS_LEFT_OUT)]


def _matches(name: str, patterns: dict[str, str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

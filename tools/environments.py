"""Fresh environments that hold built wheels and nothing of this repository.

They borrow third-party libraries from the running interpreter through a `.pth` file, so that torch
is not installed again. The running environment's editable packages stay invisible, since `.pth`
files of a borrowed folder are not read. pip never changes anything outside.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

OUTSIDE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def libraries() -> Path:
    """Return the folder of the running interpreter's libraries."""
    return Path(sysconfig.get_path("purelib"))


def needed(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """Return an installed library and all libraries that it requires here, by name."""
    if name not in found:
        found[name] = distribution(name)
        for line in found[name].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed(requirement.name, found)
    return found


def torch_alone(folder: Path) -> Path:
    """Fill a folder with links to torch and its requirements, and to nothing else."""
    folder.mkdir()
    for library in needed("torch", {}).values():
        for entry in {file.parts[0] for file in library.files or []} - {"..", "__pycache__"}:
            if not (folder / entry).exists():
                (folder / entry).symlink_to(Path(str(library.locate_file(entry))).resolve())
    return folder


def site_packages(folder: Path) -> Path:
    """Return the `site-packages` folder of an environment."""
    variables = {"base": str(folder), "platbase": str(folder)}
    return Path(sysconfig.get_path("purelib", vars=variables))


def create(folder: Path, *borrowed: Path | str) -> Path:
    """Create an environment that borrows the libraries of other folders; return its python.

    Its `.pth` file has one line for each: a folder, or a statement that every start executes.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    (site_packages(folder) / "borrowed.pth").write_text("".join(f"{b}\n" for b in borrowed))
    return folder / "bin" / "python"


def pip(python: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run pip for an environment that has no pip itself."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    return subprocess.run(
        [*command, *arguments], env=OUTSIDE, capture_output=True, text=True, check=False
    )


def run(
    python: Path, *arguments: str | Path, folder: Path, limit: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run an environment's python in a folder, for at most `limit` seconds."""
    return subprocess.run(
        [python, *arguments],
        cwd=folder,
        env=OUTSIDE,
        capture_output=True,
        text=True,
        check=False,
        timeout=limit,
    )


def install(python: Path, wheels: Iterable[Path]) -> None:
    """Install wheels without their requirements."""
    done = pip(python, "install", "--no-index", "--no-deps", *wheels)
    if done.returncode:
        raise RuntimeError(f"pip cannot install the wheels:\n{done.stdout}{done.stderr}")

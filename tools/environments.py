"""Fresh environments that hold built wheels and nothing of this repository.

They borrow third-party libraries from the running interpreter's through a `.pth` file, so that
torch is not installed again. The running environment's editable packages stay invisible, since a
borrowed folder's own `.pth` files are not read; and pip never touches what lies outside.
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
    """Return the folder of all libraries of the running interpreter."""
    return Path(sysconfig.get_path("purelib"))


def needed(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """Return an installed library and those that it requires here, each by its name."""
    if name not in found:
        found[name] = distribution(name)
        for line in found[name].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed(requirement.name, found)
    return found


def torch_alone(folder: Path) -> Path:
    """Fill a folder with links to torch and what torch requires, and to nothing else."""
    folder.mkdir()
    for library in needed("torch", {}).values():
        for entry in {file.parts[0] for file in library.files or []} - {"..", "__pycache__"}:
            if not (folder / entry).exists():
                (folder / entry).symlink_to(Path(str(library.locate_file(entry))).resolve())
    return folder


def site_packages(folder: Path) -> Path:
    """Return where an environment keeps what is installed in it."""
    variables = {"base": str(folder), "platbase": str(folder)}
    return Path(sysconfig.get_path("purelib", vars=variables))


def create(folder: Path, *borrowed: Path | str) -> Path:
    """Make an environment that has the libraries of other folders; return its python.

    A `.pth` file has a line for each: a folder, or a statement that every start executes.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    (site_packages(folder) / "borrowed.pth").write_text("".join(f"{b}\n" for b in borrowed))
    return folder / "bin" / "python"


def pip(python: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run pip for an environment, which has none itself."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    return subprocess.run(
        [*command, *arguments], env=OUTSIDE, capture_output=True, text=True, check=False
    )


def run(
    python: Path, *arguments: str | Path, folder: Path, limit: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run an environment's python in a folder, for `limit` seconds at most."""
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
    """Install wheels as they are, without what they require."""
    done = pip(python, "install", "--no-index", "--no-deps", *wheels)
    if done.returncode:
        raise RuntimeError(f"pip cannot install the wheels:\n{done.stdout}{done.stderr}")

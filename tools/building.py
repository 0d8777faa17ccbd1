"""Build wheels and sdists of the packages, from sources, from an sdist, or as other versions."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from .packages import folder, version, version_files

BUILD = "import sys, hatchling.build as it; print(getattr(it, sys.argv[1])(sys.argv[2]))"


def build(source: Path, into: Path, kind: str = "wheel") -> Path:
    """Build the `wheel` or the `sdist` of the package in folder `source`; return its path."""
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(into)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"no {kind} of {source} can be built:\n{done.stdout}{done.stderr}")
    return into / done.stdout.split()[-1]


def unpack(sdist: Path, into: Path) -> Path:
    """Unpack an sdist; return the folder in it."""
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # since Python 3.11.4
        archive.extractall(into)
    return into / sdist.name.removesuffix(".tar.gz")


def of_version(package: str, other: str, into: Path) -> Path:
    """Copy a package's sources into a folder, with another version; return the copy."""
    copy = into / f"{package}-{other}"
    shutil.copytree(folder(package), copy, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    for each in version_files(package):
        text = each.read_text().replace(f'"{version(package)}"', f'"{other}"')
        (copy / each.relative_to(folder(package))).write_text(text)
    return copy

"""The packages and their requirements of one another, read from their pyprojects."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(p.parent.name for p in ROOT.glob("packages/*/pyproject.toml"))


def pyproject(package: str) -> dict[str, Any]:
    """Return a package's `pyproject.toml`."""
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())


def distribution(requirement: str) -> str:
    """Return the name in a requirement such as `torch>=2.10`."""
    return re.split(r"[^\w-]", requirement)[0]


def requirements(package: str) -> list[str]:
    """Return the sibling packages in a package's `dependencies`."""
    names = map(distribution, pyproject(package)["project"]["dependencies"])
    return [name for name in names if name in PACKAGES]


def closure(package: str) -> list[str]:
    """Return the package and all siblings that it needs, directly or indirectly."""
    found: list[str] = []
    waiting = [package]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.append(name)
            waiting += requirements(name)
    return sorted(found)


def dependents(package: str) -> list[str]:
    """Return the siblings that need the package, directly or indirectly."""
    return [name for name in PACKAGES if name != package and package in closure(name)]


def portions(package: str) -> list[str]:
    """Return the folders that the package's wheel installs, such as `scaletorch/dist`."""
    wheel = pyproject(package)["tool"]["hatch"]["build"]["targets"]["wheel"]
    return [folder.removeprefix("src/") for folder in wheel["only-include"]]


def version_file(package: str) -> Path:
    """Return the file that holds the package's version."""
    path: str = pyproject(package)["tool"]["hatch"]["version"]["path"]
    return ROOT / "packages" / package / path


def version_files(package: str) -> list[Path]:
    """Return all files with the package's version; a portion can be imported without the others."""
    return sorted(folder(package).glob("src/**/_version.py"))


def modules(package: str) -> list[str]:
    """Return the import names of the package's portions."""
    return [portion.replace("/", ".") for portion in portions(package)]


def version(package: str) -> str:
    """Return the package's version."""
    found = re.search(r'^__version__ = "(.+)"$', version_file(package).read_text(), re.M)
    if found is None:
        raise RuntimeError(f"{version_file(package)} has no line __version__ = ...")
    return found[1]


def folder(package: str) -> Path:
    """Return the package's folder."""
    return ROOT / "packages" / package

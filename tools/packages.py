"""The packages of this repository, and which of them need which, from their pyprojects."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))


def pyproject(package: str) -> dict[str, Any]:
    """Return a package's pyproject."""
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())


def distribution(requirement: str) -> str:
    """Return the name in a requirement such as ``torch>=2.10``."""
    return re.split(r"[^\w-]", requirement)[0]


def requirements(package: str) -> list[str]:
    """Return the sibling packages that one names in its ``dependencies``."""
    names = map(distribution, pyproject(package)["project"]["dependencies"])
    return [name for name in names if name in PACKAGES]


def closure(package: str) -> list[str]:
    """Return the package and all siblings that it needs, directly or not."""
    found: list[str] = []
    waiting = [package]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.append(name)
            waiting += requirements(name)
    return sorted(found)

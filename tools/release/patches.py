"""The limits of a patch release: it must keep all public names."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping

from packaging.version import Version

from ..packages import ROOT
from .api import HEADS
from .versions import ReleaseError, current


def require_kept(new: Mapping[str, Version]) -> None:
    """Refuse patch releases that remove or change recorded names.

    Args:
        new: New version of each package in the release.

    Raises:
        ReleaseError: A package's api.txt or building.txt has lost lines since the tag of its
            current version, and its new version is of the same series.
    """
    for package, version in new.items():
        old = current(package)
        if (version.major, version.minor) != (old.major, old.minor):
            continue
        lost = sorted(
            set(entries(recorded(package, f"{package}-v{old}"))) - set(entries(now(package)))
        )
        if lost:
            names = "\n  ".join(lost)
            raise ReleaseError(
                f"{package} {version} would lack what {old} has, which other wheels may need: "
                f"release a minor version instead, or keep\n  {names}"
            )


def now(package: str) -> str:
    """Return the names as recorded now."""
    files = (ROOT / "packages" / package / name for name in HEADS)
    return "\n".join(file.read_text() for file in files if file.exists())


def recorded(package: str, tag: str) -> str:
    """Return the names as recorded at a tag; empty if there is no such tag."""
    shown = [f"{tag}:packages/{package}/{name}" for name in HEADS]
    runs = [
        subprocess.run(
            ["git", "-C", str(ROOT), "show", each], capture_output=True, text=True, check=False
        )
        for each in shown
    ]
    return "\n".join(done.stdout for done in runs if done.returncode == 0)


def entries(text: str) -> Iterator[str]:
    """Yield each recorded name with its module and class."""
    module = owner = ""
    for line in text.splitlines():
        name = line.strip()
        if not name or name.startswith("#"):
            continue
        depth = (len(line) - len(line.lstrip())) // 4
        if depth == 0:
            module = name
        elif depth == 1:
            owner = name
            yield f"{module}: {name}"
        else:
            yield f"{module}: {owner.partition('(')[0]}.{name}"

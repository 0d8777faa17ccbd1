"""The limits of a patch release: it must keep all public names."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping

from packaging.version import Version

from ..packages import ROOT
from .versions import ReleaseError, current


def require_kept(new: Mapping[str, Version]) -> None:
    """Refuse patch releases that remove or change recorded names.

    Args:
        new: New version of each package in the release.

    Raises:
        ReleaseError: A package's api.txt has lost lines since the tag of its current version, and
            its new version is of the same series.
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
    """Return the public names as recorded now."""
    return (ROOT / "packages" / package / "api.txt").read_text()


def recorded(package: str, tag: str) -> str:
    """Return the public names as recorded at a tag; empty if there is no such tag."""
    shown = f"{tag}:packages/{package}/api.txt"
    done = subprocess.run(
        ["git", "-C", str(ROOT), "show", shown], capture_output=True, text=True, check=False
    )
    return done.stdout if done.returncode == 0 else ""


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

"""Versions of the packages and the pins between them, and their changes in a release."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from ..packages import PACKAGES, ROOT, folder, pyproject, version, version_files

STEPS = ("patch", "minor", "major")
_VERSION = re.compile(r'__version__ = "([^"]+)"')


class ReleaseError(ValueError):
    """An error that prevents a release; the message says how to fix it."""


def current(package: str) -> Version:
    """Return the current version of the sources."""
    return Version(version(package))


def stepped(version: Version, step: str) -> Version:
    """Return the version after a step: `patch`, `minor` or `major`."""
    major, minor, micro = version.release
    numbers = {
        "patch": (major, minor, micro + 1),
        "minor": (major, minor + 1, 0),
        "major": (major + 1, 0, 0),
    }[step]
    return Version(".".join(map(str, numbers)))


def target(package: str, step: str) -> Version:
    """Return the version that a step or an explicit version leads to.

    Raises:
        ReleaseError: It is neither; or the version is below the current one, or is the current one
            and released already.
    """
    if step in STEPS:
        return stepped(current(package), step)
    try:
        version = Version(step)
    except InvalidVersion:
        raise ReleaseError(f"{step!r} is none of {', '.join(STEPS)} and no version") from None
    if len(version.release) != 3 or str(version) != version.base_version:
        raise ReleaseError(f"a version has three numbers, such as 0.2.0; not {step!r}")
    if version < current(package):
        raise ReleaseError(f"{package} is at {current(package)}: {version} would go back")
    if version == current(package) and not is_unreleased(package):
        raise ReleaseError(f"{package} {version} is released; name a higher version or a step")
    return version


def changelog(package: str) -> Path:
    """Return the package's changelog."""
    return ROOT / "packages" / package / "CHANGELOG.md"


def is_unreleased(package: str) -> bool:
    """Return whether the changelog calls the current version unreleased."""
    return f"## {current(package)} (unreleased)\n" in changelog(package).read_text()


def is_released(package: str) -> bool:
    """Return whether the changelog has a date for the current version."""
    heading = rf"^## {re.escape(str(current(package)))} \(\d{{4}}-\d\d-\d\d\)$"
    return re.search(heading, changelog(package).read_text(), re.M) is not None


def siblings_needed(package: str) -> Iterator[Requirement]:
    """Yield the requirements of sibling packages, including those of extras."""
    project = pyproject(package)["project"]
    extras = project.get("optional-dependencies", {}).values()
    for text in itertools.chain(project["dependencies"], *extras):
        requirement = Requirement(text)
        if requirement.name in PACKAGES:
            yield requirement


def plan(packages: list[str], step: str) -> dict[str, Version]:
    """Return the new version of each package in a release.

    If a package's pin refuses the new version of another, it gets a new pin and the next minor
    version itself, since its users move to another series of what it needs.

    Raises:
        ReleaseError: A package is unknown, or see `target`.
    """
    if unknown := set(packages) - {*PACKAGES}:
        raise ReleaseError(f"unknown: {', '.join(sorted(unknown))}; one of {', '.join(PACKAGES)}")
    new = {package: target(package, step) for package in packages}
    waiting = list(new)
    while waiting:
        moved = waiting.pop()
        for package in PACKAGES:
            least = stepped(current(package), "minor")
            if refused(package, moved, new[moved]) and new.get(package, current(package)) < least:
                new[package] = least
                waiting.append(package)
    return dict(sorted(new.items()))


def refused(package: str, needed: str, version: Version) -> bool:
    """Return whether a pin of `package` excludes this version of `needed`."""
    return any(
        requirement.name == needed and not requirement.specifier.contains(version)
        for requirement in siblings_needed(package)
    )


def write_version(package: str, new: Version) -> None:
    """Write a package's new version."""
    for file in version_files(package):
        file.write_text(_VERSION.sub(f'__version__ = "{new}"', file.read_text()))


def move_pins(package: str, new: dict[str, Version]) -> list[str]:
    """Write pins that admit the new versions of others; return the names of the moved ones.

    Pins are in the metadata, and in the code that compares versions at import.
    """
    moved = sorted(name for name, version in new.items() if refused(package, name, version))
    for file in (folder(package) / "pyproject.toml", *version_files(package)):
        text = file.read_text()
        for name in moved:
            pin = f"~={new[name].major}.{new[name].minor}.0"
            text = re.sub(rf'("{name}(?:\[[^\]]*\])?)~=[^"\s;]+', rf"\g<1>{pin}", text)
        file.write_text(text)
    return moved

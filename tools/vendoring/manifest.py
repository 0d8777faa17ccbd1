"""What a vendored folder says of itself, and how it differs from that.

The manifest lies in the vendored folder and lists every other file of it.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..packages import ROOT, closure, distribution, pyproject

NAME = "VENDORED.json"
LICENCE = "LICENSE"
_FORMAT = "scaletorch-vendored"
_VERSION_LINE = "__version__ = "


class VendorError(Exception):
    """What was asked for cannot be done; the message says why, and nothing was changed."""


@dataclass(frozen=True)
class Manifest:
    """What lies in a vendored folder.

    Attributes:
        asked: The packages that were asked for; those they need are copied too.
        versions: Of each package copied.
        requires: What the copy needs that is not ours, as pip writes it.
        commit: The commit that was copied, "+" behind it where files were changed since; None where
            git does not tell.
        licence: Its name; the text is in `LICENCE`.
        files: The sha256 of every file, by its path in the folder.
    """

    asked: list[str]
    versions: dict[str, str]
    requires: list[str]
    commit: str | None
    licence: str
    files: dict[str, str]

    def to_json(self) -> str:
        """Return the manifest as its file has it."""
        return json.dumps({"format": _FORMAT, "format_version": 1, **asdict(self)}, indent=1) + "\n"


def read(folder: Path) -> Manifest:
    """Return the manifest of a vendored folder.

    Raises:
        VendorError: There is none, or it is none of ours.
    """
    path = folder / NAME
    try:
        content = json.loads(path.read_text())
        if (content.pop("format"), content.pop("format_version")) != (_FORMAT, 1):
            raise ValueError("another format")
        manifest = Manifest(**content)
        for name in manifest.files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"{name!r} is not in the folder")
    except FileNotFoundError:
        raise VendorError(f"{folder} has no {NAME}: it was not made by this tool") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise VendorError(f"{path} cannot be read: {error}") from error
    return manifest


def describe(asked: Iterable[str]) -> tuple[Manifest, dict[str, Path]]:
    """Return the manifest of what this clone has of packages, and where each file lies."""
    asked = sorted(set(asked))
    needed = sorted({name for package in asked for name in closure(package)})
    sources = {LICENCE: ROOT / LICENCE}
    for name in needed:
        sources |= _sources(name)
    projects = [pyproject(name)["project"] for name in needed]
    requires = {d for project in projects for d in project["dependencies"]}
    manifest = Manifest(
        asked,
        {name: _version(name) for name in needed},
        sorted(d for d in requires if distribution(d) not in needed),
        _commit(),
        projects[0]["license"],
        {name: digest(path) for name, path in sorted(sources.items())},
    )
    return manifest, sources


def digest(path: Path) -> str:
    """Return a file's sha256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def contents(folder: Path) -> set[str]:
    """Return the paths of all files in a folder but Python's caches."""
    every = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    files = (path.relative_to(folder) for path in every)
    return {file.as_posix() for file in files if "__pycache__" not in file.parts}


@dataclass(frozen=True)
class Differences:
    """How a vendored folder differs from its manifest, by paths in it."""

    edited: list[str]
    missing: list[str]
    stray: list[str]

    def lines(self) -> list[str]:
        """Return one line for each file."""
        return [f"{what}: {name}" for what, names in vars(self).items() for name in names]


def differences(folder: Path, manifest: Manifest) -> Differences:
    """Compare every file of a folder with its manifest."""
    there = contents(folder) - {NAME}
    known = there & manifest.files.keys()
    return Differences(
        sorted(name for name in known if not _has(folder / name, manifest.files[name])),
        sorted(manifest.files.keys() - there),
        sorted(there - known),
    )


def _has(path: Path, expected: str) -> bool:
    return path.is_file() and digest(path) == expected


def _sources(package: str) -> dict[str, Path]:
    """Return the files that a package's wheel has below ``scaletorch``, by their path there."""
    folder = ROOT / "packages" / package
    target = pyproject(package)["tool"]["hatch"]["build"]["targets"]["wheel"]
    base = folder / target["sources"][0] / "scaletorch"
    files = {
        path.relative_to(base): path
        for part in target["only-include"]
        for path in (folder / part).rglob("*")
        if path.is_file()
    }
    hidden = {f for f in files if any(p[0] == "." or p == "__pycache__" for p in f.parts)}
    return {file.as_posix(): path for file, path in files.items() if file not in hidden}


def _version(package: str) -> str:
    path: str = pyproject(package)["tool"]["hatch"]["version"]["path"]
    text = (ROOT / "packages" / package / path).read_text()
    return text.partition(_VERSION_LINE)[2].split()[0].strip("\"'")


def _commit() -> str | None:
    asked = (
        ["rev-parse", "--show-toplevel"],
        ["rev-parse", "HEAD"],
        ["status", "--porcelain", "--", LICENCE, ":(glob)packages/*/src/**"],
    )
    try:
        top, commit, changes = (
            subprocess.run(
                ["git", *each], cwd=ROOT, check=True, capture_output=True, text=True
            ).stdout.strip()
            for each in asked
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + "+" * bool(changes) if Path(top) == ROOT else None

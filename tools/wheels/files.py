"""The files of built wheels: each wheel has all of its own files and no others."""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..packages import ROOT, folder, portions
from ..rows import found


def names(wheel: Path) -> set[str]:
    """Return the paths of a wheel's files."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def about(wheel: Path, name: str) -> str:
    """Return the text of a file in a wheel's `.dist-info`, empty if there is none."""
    with zipfile.ZipFile(wheel) as archive:
        held = [each for each in archive.namelist() if each.endswith(f".dist-info/{name}")]
        return archive.read(held[0]).decode() if held else ""


def sources(package: str) -> set[str]:
    """Return the paths below a package's `src`, which its wheel must have."""
    source = folder(package) / "src"
    files = (path for path in source.rglob("*") if path.is_file())
    return {str(f.relative_to(source)) for f in files if f.parent.name != "__pycache__"}


def wrong_files(wheel: Path, package: str) -> Iterator[str]:
    """Yield a sentence for each foreign file of a wheel, and for each missing one."""
    held = {name for name in names(wheel) if ".dist-info/" not in name}
    inside = {n for n in held if any(n.startswith(f"{each}/") for each in portions(package))}
    for name in sorted(held - inside):
        yield f"{name} lies outside {', '.join(portions(package))}"
    for name in sorted(inside - sources(package)):
        yield f"{name} is no file of the package's sources"
    for name in sorted(sources(package) - held):
        yield f"{name} is missing"
    for each in portions(package):
        if f"{each}/py.typed" not in held:
            yield f"{each}/py.typed is missing, without which type checkers do not read it"
    if about(wheel, "licenses/LICENSE") != (ROOT / "LICENSE").read_text():
        yield "its licenses/LICENSE is not the project's"


def own_files(wheel: Path, package: str) -> str:
    """Check a wheel's files."""
    where = ", ".join(portions(package))
    otherwise = f"{len(sources(package))} own files with py.typed, LICENSE: {where}"
    return found(wrong_files(wheel, package), otherwise)


def shared_paths(wheels: Iterable[Path]) -> list[str]:
    """Return the paths in several wheels, of which one file would replace the other."""
    count = Counter(name for wheel in wheels for name in names(wheel))
    return sorted(name for name, times in count.items() if times > 1)


def no_shared_paths(wheels: Iterable[Path]) -> str:
    """Check that all wheels can be installed together."""
    wheels = list(wheels)
    total = sum(len(names(wheel)) for wheel in wheels)
    faults = (f"{path} is in several wheels" for path in shared_paths(wheels))
    return found(faults, f"{total} paths in {len(wheels)} wheels, each in one")

"""The folder of another project that gets a copy: whether it will do, and how a copy gets there."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from importlib.machinery import PathFinder
from keyword import iskeyword
from pathlib import Path

from .manifest import NAME, Manifest, VendorError, differences

FOLDER = "scaletorch"


def require_place(into: Path) -> None:
    """Make sure that a copy in a folder can be imported from there.

    Raises:
        VendorError: It could not be.
    """
    if not into.parent.is_dir():
        raise VendorError(f"{into.parent} is no folder: --into is a folder in an existing one")
    if into.exists() and not into.is_dir():
        raise VendorError(f"{into} is a file: --into is a folder")
    if not into.name.isidentifier() or iskeyword(into.name):
        raise VendorError(f"{into.name!r} is no name that Python can import; give another --into")
    if (into / FOLDER).is_symlink():
        raise VendorError(f"{into / FOLDER} is a link: give the folder itself")
    importlib.invalidate_caches()
    for name, folder in ((into.name, into.parent), (FOLDER, into)):
        spec = PathFinder.find_spec(name, [str(folder)]) if folder.is_dir() else None
        if spec is not None and spec.submodule_search_locations is None:
            raise VendorError(f"{spec.origin} hides the folder {folder / name} from imports")


def put(target: Path, manifest: Manifest, sources: Mapping[str, Path], keep: Iterable[str]) -> None:
    """Make the whole folder beside its place, then move it there.

    Args:
        target: Where it is to be; what is there is replaced.
        manifest: Of the new one.
        sources: Where each file is copied from.
        keep: What of the old one is carried over.

    Raises:
        VendorError: A file changed while it was copied.
    """
    new = Path(tempfile.mkdtemp(prefix=f".{FOLDER}-", dir=target.parent))
    try:
        for name, source in [*sources.items(), *((name, target / name) for name in keep)]:
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copyfile if name in sources else shutil.copy2
            copy(source, new / name, follow_symlinks=name in sources)
        (new / NAME).write_text(manifest.to_json())
        new.chmod(target.parent.stat().st_mode & 0o777)
        found = differences(new, manifest)
        if found.edited or found.missing:
            raise VendorError("this clone changed meanwhile: " + ", ".join(found.lines()))
        _move(new, target)
    except BaseException:
        shutil.rmtree(new)
        raise


def _move(new: Path, target: Path) -> None:
    old = new.with_name(f"{new.name}-old")
    if target.exists():
        target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
    importlib.invalidate_caches()  # for a program that imports the copy now


def ignored(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the files that the project's git would leave out of a commit."""
    command = ["git", "-C", str(folder), "check-ignore", "--stdin"]
    try:
        done = subprocess.run(
            command, input="\n".join(names), capture_output=True, text=True, check=False
        )
    except OSError:  # no git here
        return []
    return done.stdout.splitlines()

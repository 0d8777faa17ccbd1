"""Copy packages into another project, as a plain ``scaletorch`` folder with a manifest.

``python -m tools.vendoring --packages tp,cp --into path/to/acme/_vendor`` copies tp, cp and what
they need from this clone to ``path/to/acme/_vendor/scaletorch``; ``--update`` brings such a copy to
what this clone has; ``--check`` compares it with its manifest. docs/vendoring.md is the guide.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from ..packages import PACKAGES
from .manifest import NAME, Manifest, VendorError, describe, differences, read
from .place import FOLDER, ignored, put, require_place


def vendor(packages: Iterable[str], into: Path) -> Manifest:
    """Copy packages, and what they need, to a folder that has no copy yet.

    Raises:
        VendorError: No such package, or the folder cannot hold an importable copy.
    """
    names = [full_name(package) for package in packages]
    require_place(into)
    target = into / FOLDER
    if os.path.lexists(target):
        hint = "it is a vendored copy: --update it" if (target / NAME).exists() else "move it away"
        raise VendorError(f"{target} exists; {hint}")
    manifest, sources = describe(names)
    made = not into.exists()
    into.mkdir(exist_ok=True)
    try:
        put(target, manifest, sources, keep=())
    except BaseException:
        if made:
            into.rmdir()
        raise
    return manifest


def update(into: Path, packages: Iterable[str] = (), *, force: bool = False) -> Manifest:
    """Bring a copy to what this clone has; what the manifest does not list stays.

    Args:
        into: The folder that has it.
        packages: What to copy from now on; as before by default.
        force: Also where listed files were edited or removed, which are then as in this clone.

    Raises:
        VendorError: Listed files were edited or removed, or others are where new ones would be.
    """
    names = [full_name(package) for package in packages]
    target = into / FOLDER
    require_place(into)
    old = read(target)
    found = differences(target, old)
    if (found.edited or found.missing) and not force:
        lines = [line for line in found.lines() if not line.startswith("stray")]
        raise VendorError(
            f"{target} was changed since it was copied: move the changes elsewhere, or lose them "
            "with --force\n  " + "\n  ".join(lines)
        )
    manifest, sources = describe(names or map(full_name, old.asked))
    taken = sorted(manifest.files.keys() & set(found.stray))
    if taken:
        raise VendorError(
            f"files of {target} that are not of the copy are where new ones of it would be; move "
            "them away: " + ", ".join(taken)
        )
    if found.edited or found.missing or manifest != old:
        put(target, manifest, sources, keep=found.stray)
    return manifest


def check(into: Path) -> tuple[list[str], list[str]]:
    """Compare a copy with its manifest, and the manifest with this clone.

    Returns:
        What is wrong with the copy; and what this clone has that it has not.

    Raises:
        VendorError: There is no copy, or its manifest cannot be read.
    """
    target = into / FOLDER
    manifest = read(target)
    problems = differences(target, manifest).lines()
    problems += [f"ignored by git: {name}" for name in ignored(target, manifest.files)]
    try:
        require_place(into)
    except VendorError as error:
        problems.append(str(error))
    return problems, list(_news(manifest))


def full_name(package: str) -> str:
    """Return a package's name, of a short one too: ``tp`` is ``scaletorch-tp``.

    Raises:
        VendorError: There is no such package.
    """
    for name in (package, f"scaletorch-{package}"):
        if name in PACKAGES:
            return name
    short = [name.removeprefix("scaletorch-") for name in PACKAGES]
    raise VendorError(f"there is no package {package!r}: the packages are {', '.join(short)}")


def _news(manifest: Manifest) -> Iterable[str]:
    try:
        upstream, _ = describe(map(full_name, manifest.asked))
    except VendorError as error:
        yield f"in this clone {error}"
        return
    for name, version in upstream.versions.items():
        had = manifest.versions.get(name)
        if had is None:
            yield f"{name} {version} is needed by what this clone has"
        elif had != version:
            how = "newer" if _release(version) > _release(had) else "older"
            yield f"{name} {version} in this clone is {how} than {had}"
    if upstream.versions == manifest.versions and upstream.files != manifest.files:
        either = {file for file, _ in upstream.files.items() ^ manifest.files.items()}
        yield f"{len(either)} files differ in this clone, of the same versions"


def _release(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def _told(manifest: Manifest, into: Path) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    lines = [f"{into / FOLDER}: {packages}; {len(manifest.files)} files"]
    left_out = ignored(into / FOLDER, manifest.files)
    if left_out:
        lines.append(
            f"warning: git ignores {len(left_out)} of them, such as {left_out[0]}: say "
            f"!**/{into.name}/{FOLDER}/dist/ behind that rule in .gitignore"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Do what the command line says; 1 where that cannot be done, or a check found something."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tools.vendoring")
    parser.add_argument("--into", type=Path, required=True, help="the folder in your project")
    parser.add_argument("--packages", help="such as tp,cp; 'scaletorch' is everything")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--update", action="store_true", help="bring a copy to what is here")
    action.add_argument("--check", action="store_true", help="compare a copy with its manifest")
    parser.add_argument("--force", action="store_true", help="with --update: lose local changes")
    options = parser.parse_args(arguments)
    packages = [name for name in (options.packages or "").split(",") if name]
    if not (packages or options.update or options.check) or (packages and options.check):
        parser.error("give --packages to copy, --update, or --check")
    if options.force and not options.update:
        parser.error("--force goes with --update")
    into = Path(os.path.abspath(options.into))
    try:
        if options.check:
            problems, news = check(into)
            print("\n".join(problems or [f"{into / FOLDER} is as it was copied"]))
            print("\n".join(news or ["this clone has nothing else"]))
            return int(bool(problems))
        manifest = (
            update(into, packages, force=options.force)
            if options.update
            else vendor(packages, into)
        )
    except (VendorError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(_told(manifest, into))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

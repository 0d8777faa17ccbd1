"""Copy packages into another project, as a plain `scaletorch` folder with a manifest.

`python -m tools.vendoring --packages tp,cp --into path/to/acme/_vendor` copies tp, cp and the
packages that they need from this clone to `path/to/acme/_vendor/scaletorch`; `--update` brings
such a copy to the state of this clone; `--check` compares it with its manifest. The guide is
docs/vendoring.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from keyword import iskeyword
from pathlib import Path
from typing import Any

from .packages import PACKAGES, ROOT, closure, distribution, pyproject, version

FOLDER, NAME, LICENCE = "scaletorch", "VENDORED.json", "LICENSE"
Manifest = dict[str, Any]


class VendorError(Exception):
    """A request that cannot be met; the message says why."""


def vendor(packages: Iterable[str], into: Path) -> Manifest:
    """Copy packages, and those they need, to a folder without a copy.

    Raises:
        VendorError: There is no such package, or the folder cannot hold an importable copy.
    """
    manifest, sources = describe(packages)
    target = into / FOLDER
    if not into.parent.is_dir():
        raise VendorError(f"{into.parent} is no folder: --into is a folder in an existing one")
    if not into.name.isidentifier() or iskeyword(into.name):
        raise VendorError(f"{into.name!r} is no name that Python can import; give another --into")
    if target.exists():
        hint = "it is a vendored copy: --update it" if (target / NAME).exists() else "move it away"
        raise VendorError(f"{target} exists; {hint}")
    _copy(target, manifest, sources)
    return manifest


def update(into: Path, packages: Iterable[str] = ()) -> Manifest:
    """Bring a copy to the state of this clone; files that the manifest does not list stay.

    Args:
        into: Folder with the copy.
        packages: Packages to copy from now on; by default those of the copy.

    Raises:
        VendorError: Listed files were edited or removed, or other files are in the way of new ones.
    """
    target = into / FOLDER
    old = read(target)
    if changed := [line for line in differences(target, old) if not line.startswith("stray")]:
        raise VendorError(
            f"{target} was changed since it was copied: move the changes elsewhere and put the "
            "files back, or remove the folder and copy it anew\n  " + "\n  ".join(changed)
        )
    manifest, sources = describe(packages or old["asked"])
    strangers = contents(target) - old["files"].keys() - {NAME}
    if taken := sorted(manifest["files"].keys() & strangers):
        raise VendorError(
            f"files of {target} that are not of the copy are where new ones of it would be; move "
            "them away: " + ", ".join(taken)
        )
    for name in old["files"]:
        (target / name).unlink()
    _copy(target, manifest, sources)
    return manifest


def check(into: Path) -> tuple[list[str], list[str]]:
    """Compare a copy with its manifest, and the manifest with this clone.

    Returns:
        Problems of the copy, and differences of this clone.

    Raises:
        VendorError: There is no copy, or its manifest cannot be read.
    """
    manifest = read(into / FOLDER)
    upstream, _ = describe(manifest["asked"])
    news = [
        f"{name} {number} is in this clone, and {manifest['versions'].get(name)} in the copy"
        for name, number in upstream["versions"].items()
        if manifest["versions"].get(name) != number
    ]
    if not news and upstream["files"] != manifest["files"]:
        news = ["files differ in this clone, of the same versions"]
    return differences(into / FOLDER, manifest), news


def describe(packages: Iterable[str]) -> tuple[Manifest, dict[str, Path]]:
    """Return the manifest of packages in this clone, and the path of each of their files.

    Raises:
        VendorError: There is no such package.
    """
    asked = sorted({_full_name(package) for package in packages})
    needed = sorted({name for package in asked for name in closure(package)})
    sources = {LICENCE: ROOT / LICENCE}
    for name in needed:
        sources |= _sources(name)
    projects = [pyproject(name)["project"] for name in needed]
    requires = {d for project in projects for d in project["dependencies"]}
    manifest = {
        "asked": asked,
        "versions": {name: version(name) for name in needed},
        "requires": sorted(d for d in requires if distribution(d) not in needed),
        "commit": _commit(),
        "licence": projects[0]["license"],
        "files": {name: _digest(path) for name, path in sorted(sources.items())},
    }
    return manifest, sources


def read(folder: Path) -> Manifest:
    """Return the manifest of a vendored folder.

    Raises:
        VendorError: There is none, or it cannot be read.
    """
    path = folder / NAME
    try:
        manifest: Manifest = json.loads(path.read_text())
        if any(".." in Path(name).parts or Path(name).is_absolute() for name in manifest["files"]):
            raise ValueError("it names files outside of the folder")
        _ = manifest["asked"], manifest["versions"]
    except FileNotFoundError:
        raise VendorError(f"{folder} has no {NAME}: it was not made by this tool") from None
    except (ValueError, KeyError, TypeError) as error:
        raise VendorError(f"{path} cannot be read: {error!r}") from error
    return manifest


def contents(folder: Path) -> set[str]:
    """Return the paths of all files in a folder except Python's caches."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    return {file.as_posix() for file in files if "__pycache__" not in file.parts}


def differences(folder: Path, manifest: Manifest) -> list[str]:
    """Return a line for each file of a folder that differs from its manifest."""
    there, files = contents(folder) - {NAME}, manifest["files"]
    edited = [name for name in there & files.keys() if _digest(folder / name) != files[name]]
    found = {"edited": edited, "missing": files.keys() - there, "stray": there - files.keys()}
    return [f"{kind}: {name}" for kind, names in found.items() for name in sorted(names)]


def _copy(target: Path, manifest: Manifest, sources: Mapping[str, Path]) -> None:
    for name, source in sources.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / name)
    (target / NAME).write_text(json.dumps(manifest, indent=1) + "\n")


def _full_name(package: str) -> str:
    """Return a package's full name; `tp` is short for `scaletorch-tp`."""
    for name in (package, f"scaletorch-{package}"):
        if name in PACKAGES:
            return name
    short = [name.removeprefix("scaletorch-") for name in PACKAGES]
    raise VendorError(f"there is no package {package!r}: the packages are {', '.join(short)}")


def _sources(package: str) -> dict[str, Path]:
    """Return the files of a package's wheel below `scaletorch`, by their path there."""
    folder = ROOT / "packages" / package
    target = pyproject(package)["tool"]["hatch"]["build"]["targets"]["wheel"]
    base = folder / target["sources"][0] / FOLDER
    paths = (path for part in target["only-include"] for path in (folder / part).rglob("*"))
    files = {path.relative_to(base): path for path in paths if path.is_file()}
    hidden = {f for f in files if any(p[0] == "." or p == "__pycache__" for p in f.parts)}
    return {file.as_posix(): path for file, path in files.items() if file not in hidden}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _commit() -> str | None:
    """Return the clone's commit, followed by "+" if sources were changed since."""
    changes = ["status", "--porcelain", "--", LICENCE, ":(glob)packages/*/src/**"]
    try:
        commit, changed = (
            subprocess.check_output(["git", *words], cwd=ROOT, stderr=subprocess.DEVNULL, text=True)
            for words in (["rev-parse", "HEAD"], changes)
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.strip() + "+" * bool(changed)


def main(arguments: list[str]) -> int:
    """Run the command line; return 1 if that fails, or if a check found something."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tools.vendoring")
    parser.add_argument("--into", type=Path, required=True, help="the folder in your project")
    parser.add_argument("--packages", help="such as tp,cp; 'scaletorch' is everything")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--update", action="store_true", help="bring a copy to this clone's state")
    action.add_argument("--check", action="store_true", help="compare a copy with its manifest")
    options = parser.parse_args(arguments)
    packages = [name for name in (options.packages or "").split(",") if name]
    if not (packages or options.update or options.check) or (packages and options.check):
        parser.error("give --packages to copy, --update, or --check")
    into = options.into.absolute()
    try:
        if options.check:
            problems, news = check(into)
            print("\n".join(problems or [f"{into / FOLDER} is as it was copied"]))
            print("\n".join(news or ["this clone has nothing else"]))
            return int(bool(problems))
        manifest = update(into, packages) if options.update else vendor(packages, into)
    except (VendorError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    copied = ", ".join(f"{name} {number}" for name, number in manifest["versions"].items())
    print(f"{into / FOLDER}: {copied}; {len(manifest['files'])} files")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

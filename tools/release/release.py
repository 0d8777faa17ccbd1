"""Make a release: versions, pins, changelogs, distributions. Nothing is committed or uploaded.

`python -m tools.release bump minor scaletorch-dist` raises the package's version, moves the pins of
packages that need it (and raises their versions if their pin refused the new one), writes the
project's addresses into every package (`addresses.py`), turns the fragments in
`packages/NAME/changes` into changelog entries, builds and checks the distributions, and prints the
next commands. The step is `patch`, `minor`, `major` or a version. With `--dry-run` everything
happens in a scratch clone and is shown as a diff.

`python -m tools.release build` builds and checks the packages whose changelog has a date for their
version, or the named ones.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.version import Version

from .. import building
from ..packages import PACKAGES, ROOT, folder
from .addresses import check_urls, require_repository, write_urls
from .patches import require_kept
from .versions import (
    STEPS,
    ReleaseError,
    changelog,
    current,
    is_released,
    move_pins,
    plan,
    write_version,
)

NO_CHANGES = "No significant changes."  # written by towncrier if there are no fragments


def git(*arguments: str) -> str:
    """Return the output of a git command."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def bump(packages: list[str], step: str, date: str, into: Path) -> None:
    """Write the new versions, pins and changelogs, and build the packages."""
    new = plan(packages, step)
    for package, version in new.items():
        print(f"{package} {current(package)} -> {version}")
    for package in PACKAGES:
        write_urls(package)
        for needed in move_pins(package, new):
            print(f"{package} needs {needed} {new[needed]}")
            note = f"Needs {needed} {new[needed].major}.{new[needed].minor}.\n"
            fragments = changelog(package).parent / "changes"
            fragments.mkdir(exist_ok=True)
            (fragments / f"+needs-{needed}.changed.md").write_text(note)
    for package, version in new.items():
        write_version(package, version)
        write_changelog(package, version, date)
    build(list(new), into)


def write_changelog(package: str, version: Version, date: str) -> None:
    """Turn the package's fragments into the changelog section of this version."""
    folder = changelog(package).parent
    command = [sys.executable, "-m", "towncrier", "build", "--yes", "--dir", str(folder)]
    command += ["--config", str(ROOT / "pyproject.toml")]
    command += ["--version", str(version), "--date", date]
    subprocess.run(command, check=True, capture_output=True, text=True)
    text = changelog(package).read_text()
    changelog(package).write_text(join_unreleased(text, f"## {version} ({date})", version))


def join_unreleased(text: str, heading: str, version: Version) -> str:
    """Move hand-written text under `(unreleased)` into the section of the release."""
    sections = re.split(r"^(?=## )", text, flags=re.M)
    by_hand = f"## {version} (unreleased)\n"
    for place, section in enumerate(sections):
        if section.startswith(by_hand):
            release = next(i for i, each in enumerate(sections) if each.startswith(heading))
            fragments = sections[release].removeprefix(heading).replace(NO_CHANGES, "").strip()
            written = section.removeprefix(by_hand).strip()
            sections[place] = ""
            sections[release] = "\n\n".join(filter(None, [heading, written, fragments])) + "\n"
    return re.sub(r"\n{3,}", "\n\n", "".join(sections))


def build(packages: list[str], into: Path) -> None:
    """Build source distributions and wheels, and check them with twine."""
    if not packages:
        raise ReleaseError("no changelog has a date for its package's version: bump one first")
    for package in packages:
        check_urls(package)
    into.mkdir(parents=True, exist_ok=True)
    for package in packages:
        for kind in ("sdist", "wheel"):
            building.build(folder(package), into.resolve(), kind)
    files = sorted([*into.glob("*.whl"), *into.glob("*.tar.gz")])
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)


def rehearse(packages: list[str], step: str, date: str) -> None:
    """Run everything in a scratch clone, and show the diff."""
    with tempfile.TemporaryDirectory(prefix="scaletorch-release-") as scratch:
        git("clone", "-q", str(ROOT), scratch)
        words = [sys.executable, "-m", "tools.release", "bump", step, *packages, "--date", date]
        if subprocess.run(words, cwd=scratch, check=False).returncode:
            raise ReleaseError("the rehearsal failed")
        for words in (["add", "-A"], ["diff", "--cached"]):
            subprocess.run(["git", "-C", scratch, "--no-pager", *words], check=True)
    print("\nA dry run: nothing here has changed.")


def next_commands(tag: str, into: Path) -> str:
    """Return the commands for a maintainer to run after looking at the changes."""
    return f"""
Next, after a look at `git diff` and {into}:
  git add -A && git commit -m "Release {tag}"
  git tag -a {tag} -m "Release {tag}"
  git push origin HEAD {tag}    # the workflow of this tag tests everything and publishes"""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="release", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    bumping = commands.add_parser("bump", help="new versions, changelogs and distributions")
    bumping.add_argument("step", help=f"{', '.join(STEPS)}, or a version")
    bumping.add_argument("packages", nargs="+", help=f"of {', '.join(PACKAGES)}")
    bumping.add_argument("--dry-run", action="store_true", help="show it and change nothing")
    bumping.add_argument("--date", default=datetime.date.today().isoformat())
    again = commands.add_parser("build", help="distributions of what is released")
    again.add_argument("packages", nargs="*", help="instead of all that are released")
    again.add_argument("--into", type=Path, default=ROOT / "dist", help="a folder")
    return parser.parse_args(arguments)


def run(words: argparse.Namespace) -> None:
    """Run the command line.

    Raises:
        ReleaseError: There are uncommitted changes, no address of the repository is set, or see
            `plan` and `require_kept`.
    """
    if words.command == "build":
        build(words.packages or list(filter(is_released, PACKAGES)), words.into)
        return
    if git("status", "--porcelain"):
        raise ReleaseError("there are uncommitted changes: commit or stash them first")
    require_repository()
    new = plan(words.packages, words.step)
    require_kept(new)
    tag = f"{words.packages[0]}-v{new[words.packages[0]]}"
    if words.dry_run:
        rehearse(words.packages, words.step, words.date)
    else:
        bump(words.packages, words.step, words.date, ROOT / "dist" / tag)
        print(next_commands(tag, Path("dist", tag)))


def main(arguments: list[str]) -> int:
    """Run; return 1 if something prevents the release."""
    try:
        run(parse(arguments))
    except ReleaseError as error:
        print(f"no release: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"no release: {error}\n{error.stderr or ''}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

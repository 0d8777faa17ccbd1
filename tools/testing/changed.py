"""Find the packages that a change touches, and the packages that need those.

`python -m tools.testing.changed [BASE]` compares the working tree with its merge base with `BASE`
(a branch, tag or commit) and prints a line for each suite of tests that the change concerns: the
packages that it touches, then those that need them, then the tests across packages. The default
`BASE` is `origin`'s main branch, or the previous commit if that contains this commit. `--json`
prints one list, for the matrix of a workflow; `--all` prints all suites.

If git cannot tell (no repository, a shallow clone, no such commit), everything counts as touched.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable

from ..packages import PACKAGES, ROOT, closure, dependents

CROSSING = "tests"  # the suite of tests across packages
SUITES = [*PACKAGES, CROSSING]
MAIN_BRANCHES = ("origin/HEAD", "origin/main", "origin/master")

# Suites that a file concerns, by the first pattern that matches its whole path. Files without one
# (configuration, tools) concern everything.
PACKAGE_ALONE = re.compile(r"packages/([^/]+)/(?:tests/.*|changes/.*|[A-Z]+\.md)")
PACKAGE = re.compile(r"packages/([^/]+)/.*")
OTHERS = [
    (r"docs/(communication|devices)\.md", ["scaletorch-dist", CROSSING]),  # read by its tests
    (r"examples/.*", ["scaletorch", "scaletorch-dist", CROSSING]),
    (r"docs/.*|tests/.*|benchmarks/.*|[^/]*\.md|CITATION\.cff|LICENSE", [CROSSING]),
    (r"\.github/(ISSUE_TEMPLATE/.*|[^/]*\.md)|mkdocs\.yml", [CROSSING]),
]


def git(*arguments: str) -> str | None:
    """Return the output of a git command, or None if it fails."""
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def default_base() -> str | None:
    """Return the commit to compare with by default."""
    for branch in MAIN_BRANCHES:
        if shared := git("merge-base", branch, "HEAD"):
            return shared if shared != git("rev-parse", "HEAD") else git("rev-parse", "HEAD^1")
    return None


def changed_files(base: str | None) -> list[str] | None:
    """Return the files that differ from `base`, including new ones, or None if git cannot tell."""
    shared = git("merge-base", base, "HEAD") if base else default_base()
    if not shared:
        return None
    differing = git("diff", "--name-only", "--no-renames", shared)
    new = git("ls-files", "--others", "--exclude-standard")
    return None if differing is None or new is None else [*differing.split("\n"), *new.split("\n")]


def concerned(files: Iterable[str]) -> list[str]:
    """Return the suites that changed files concern, touched ones first."""
    touched: set[str] = set()
    needing: set[str] = set()
    for file in filter(None, files):
        if alone := PACKAGE_ALONE.fullmatch(file):
            touched.add(alone[1])
        elif package := PACKAGE.fullmatch(file):
            touched.add(package[1])
            needing.update(dependents(package[1]))
        else:
            touched.update(next((s for form, s in OTHERS if re.fullmatch(form, file)), SUITES))
    if not touched <= {*SUITES}:  # a package that was removed
        touched = {*SUITES}
    crossing = [CROSSING] if touched else []
    return _needed_first(touched) + _needed_first(needing - touched) + crossing


def _needed_first(suites: set[str]) -> list[str]:
    """Sort packages so that each comes after those that it needs."""
    return sorted(suites - {CROSSING}, key=lambda name: (len(closure(name)), name))


def suites_since(base: str | None = None) -> list[str]:
    """Return the suites that the change since `base` concerns, or all if git cannot tell."""
    files = changed_files(base)
    found = SUITES if files is None else concerned(files)
    return SUITES if {*found} == {*SUITES} else found


def main(arguments: list[str]) -> None:
    """Print the suites."""
    bases = [a for a in arguments if not a.startswith("-")]
    suites = SUITES if "--all" in arguments else suites_since(*bases)
    print(json.dumps(suites) if "--json" in arguments else "\n".join(suites))


if __name__ == "__main__":
    main(sys.argv[1:])

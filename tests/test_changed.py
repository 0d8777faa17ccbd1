"""Which suites a change concerns, and in which order they run."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repositories import commit, git
from tools.packages import PACKAGES, ROOT
from tools.testing import quick
from tools.testing.changed import SUITES, concerned
from tools.testing.suites import PARTS, Suite, in_order


@pytest.mark.parametrize(
    ("files", "suites"),
    [
        ([], []),
        (["packages/scaletorch-tp/src/scaletorch/x.py"], ["scaletorch-tp", "scaletorch", "tests"]),
        (["packages/scaletorch-dist/tests/test_x.py"], ["scaletorch-dist", "tests"]),
        (["docs/numerics.md", "README.md"], ["tests"]),
        (["docs/devices.md"], ["scaletorch-dist", "tests"]),
        (
            ["packages/scaletorch/README.md", "packages/scaletorch-cp/pyproject.toml"],
            ["scaletorch-cp", "scaletorch", "tests"],
        ),
    ],
)
def test_what_is_touched_comes_first_then_its_dependents(files, suites):
    assert concerned(files) == suites


@pytest.mark.parametrize(
    "file",
    ["pyproject.toml", ".ci/run", "tools/testing/changed.py", "new", "packages/gone/src/x.py"],
)
def test_what_belongs_to_nobody_touches_everything(file):
    assert {*concerned([file])} == {*SUITES}


def test_what_takes_longest_begins():
    long = ["tests", "scaletorch-dist", "scaletorch"]
    assert in_order([])[:3] == long
    assert in_order(SUITES) == in_order([])
    dp = concerned(["packages/scaletorch-dp/src/a.py"])
    assert in_order(dp)[:4] == [*long, "scaletorch-dp"]


@pytest.mark.parametrize("name", PARTS)
def test_a_suite_in_parts_runs_each_file_once(name):
    whole = Suite(name, Path("python"), [])
    parts = [part.tests for part in whole.split()]
    assert len(parts) == PARTS[name] > 1
    files = [file for part in parts for file in part]
    assert sorted(files) == sorted(whole.tests[0].rglob("test_*.py"))
    (alone,) = Suite("scaletorch-dp", Path("python"), []).split()
    assert [path.name for path in alone.tests] == ["tests"]


@pytest.fixture
def clone(tmp_path):
    """A repository with the packages' pyprojects, of one commit on `main`."""
    for package in PACKAGES:
        folder = tmp_path / "packages" / package
        folder.mkdir(parents=True)
        shutil.copy(ROOT / "packages" / package / "pyproject.toml", folder)
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copy(ROOT / ".gitignore", tmp_path)  # or what Python caches would be changes
    commit(tmp_path)
    return tmp_path


def changed(folder, *arguments):
    """What the program prints there."""
    command = [sys.executable, "-m", "tools.testing.changed", "--json", *arguments]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_git_tells_what_changed_since_a_base(clone):
    assert changed(clone) == SUITES  # no origin
    assert changed(clone, "nowhere") == SUITES
    assert changed(clone, "main") == []
    (clone / "README.md").write_text("new")
    assert changed(clone, "main") == ["tests"]
    assert changed(clone, "--all") == SUITES
    (clone / "packages/scaletorch-cp/new.py").write_text("new")
    git(clone, "switch", "-q", "-c", "branch")
    commit(clone)
    assert changed(clone, "main") == ["scaletorch-cp", "scaletorch", "tests"]
    git(clone, "switch", "-q", "main")
    git(clone, "merge", "-q", "branch")
    git(clone, "clone", "-q", str(clone), str(clone / "whole"))
    assert changed(clone / "whole") == ["scaletorch-cp", "scaletorch", "tests"]


def test_the_quick_run_has_tests_of_every_suite_and_types_of_what_mypy_knows():
    assert {*quick.TESTS} == {*SUITES}
    assert all((ROOT / file).is_file() for file in quick.tests())
    own = "packages/scaletorch-pg/src/scaletorch/parallel/pg_manager/grid.py"
    files = [own, "packages/scaletorch-pg/tests/test_grid.py", "README.md", "tools/gone.py", ""]
    assert quick.typed(files) == [own]
    assert quick.typed(None) == []

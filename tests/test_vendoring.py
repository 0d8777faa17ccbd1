"""tools/vendoring: what it copies, what it refuses, what it leaves alone, and whether it works."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from tools.packages import PACKAGES
from tools.vendoring import check as check_vendored
from tools.vendoring import vendor
from tools.vendoring.manifest import LICENCE, NAME, VendorError, contents

ROOT = Path(__file__).resolve().parent.parent
GUIDE = (ROOT / "docs" / "vendoring.md").read_text()
PLACE = "../acme/acme/_vendor"


def guides(language):
    """The guide's blocks of one language, as one text."""
    return "".join(re.findall(rf"```{language}\n(.*?)```", GUIDE, re.S))


@pytest.fixture
def into(tmp_path):
    (tmp_path / "acme").mkdir()
    return tmp_path / "acme" / "_vendor"


@pytest.fixture(scope="module")
def newer(tmp_path_factory):
    return check_vendored.newer_clone(tmp_path_factory.mktemp("clones") / "newer")


def test_vendoring_from_this_clone_does_what_it_should():
    rows = check_vendored.check()
    assert len(rows) == 9
    assert [row for row in rows if not row[2]] == []


def test_a_copy_has_what_the_wheels_have(into):
    manifest = vendor.vendor(["scaletorch"], into)
    wheels = {
        file.distribution_path.removeprefix("scaletorch/")
        for name in PACKAGES
        for file in WheelBuilder(str(ROOT / "packages" / name)).recurse_included_files()
    }
    assert manifest.files.keys() == wheels | {LICENCE}
    assert contents(into / "scaletorch") == {*manifest.files, NAME}
    assert sorted(manifest.versions) == PACKAGES
    assert (manifest.licence, manifest.requires) == ("MIT", ["torch>=2.10"])
    assert not list(into.glob("*.py")), "the project's own folders stay as they are"


def test_only_what_is_needed_is_copied(into):
    manifest = vendor.vendor(["tp", "scaletorch-cp"], into)
    assert list(manifest.versions) == [f"scaletorch-{name}" for name in ("cp", "dist", "pg", "tp")]
    found = {path.name for path in (into / "scaletorch" / "parallel").iterdir()}
    assert found == {"context_parallel", "pg_manager", "placement", "tensor_parallel"}
    vendor.update(into, ["pg"])
    found = {path.name for path in (into / "scaletorch" / "parallel").iterdir()}
    assert found == {"pg_manager", "placement"}


def test_what_the_manifest_does_not_list_is_neither_removed_nor_overwritten(into, newer):
    vendor.vendor(["tp"], into)
    own = into / "scaletorch" / "dist" / "own.py"
    own.write_text("mine\n")
    (into / "other.py").write_text("theirs\n")
    assert check_vendored.vendor(newer, into.parent, "--update").returncode == 0
    assert own.read_text() == "mine\n"
    assert check_vendored.vendor(newer, into.parent, "--check").stdout.startswith("stray: dist/own")
    vendor.update(into, ["dist"])  # back to this clone, which has no come.py
    in_the_way = into / "scaletorch" / check_vendored.COME
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_text("mine too\n")
    before = contents(into)
    refused = check_vendored.vendor(newer, into.parent, "--update", "--packages", "tp", "--force")
    assert refused.returncode == 1
    assert re.search(r"not of the copy.*move them away: \S*come.py", refused.stderr)
    assert contents(into) == before
    assert in_the_way.read_text() == "mine too\n"


@pytest.mark.parametrize("attempt", [lambda into: vendor.vendor(["tp"], into), vendor.update])
@pytest.mark.parametrize("fails", ["copyfile", "rename"])
def test_a_copy_that_fails_changes_nothing(into, monkeypatch, attempt, fails):
    updates = attempt is vendor.update
    if updates:
        vendor.vendor(["dist"], into)
        (into / "scaletorch" / "dist" / "errors.py").write_text("edited\n")
        attempt = lambda into: vendor.update(into, force=True)  # noqa: E731
    before = contents(into)
    owner = shutil if fails == "copyfile" else Path
    real, left = getattr(owner, fails), [5 if fails == "copyfile" else 1 + updates]

    def fail(*arguments, **options):
        left[0] -= 1
        if left[0] == 0:
            raise OSError("no space")
        return real(*arguments, **options)

    monkeypatch.setattr(owner, fails, fail)
    with pytest.raises(OSError, match="no space"):
        attempt(into)
    assert contents(into) == before
    assert [path.name for path in into.parent.rglob(".scaletorch*")] == []
    assert into.exists() == updates
    if updates:
        assert (into / "scaletorch" / "dist" / "errors.py").read_text() == "edited\n"


@pytest.mark.parametrize(
    ("place", "packages", "message"),
    [
        (
            "acme/_vendor",
            ["tq"],
            "there is no package 'tq': .* cp, dist, dp, ep, guard, pg, pp, tp",
        ),
        ("acme/third-party", ["tp"], "'third-party' is no name that Python can import"),
        ("acme/import", ["tp"], "'import' is no name"),
        ("acne/_vendor", ["tp"], "acne is no folder"),
        ("acme/hidden.py", ["tp"], "hidden.py is a file"),
        ("acme/hidden", ["tp"], r"hidden.py hides the folder \S+hidden from imports"),
        ("acme/full", ["tp"], "full/scaletorch exists; move it away"),
        ("acme/done", ["tp"], "done/scaletorch exists; it is a vendored copy: --update it"),
    ],
)
def test_places_that_will_not_do_are_refused(tmp_path, place, packages, message):
    (tmp_path / "acme" / "hidden").mkdir(parents=True)
    (tmp_path / "acme" / "hidden.py").touch()
    (tmp_path / "acme" / "full" / "scaletorch").mkdir(parents=True)
    vendor.vendor(["dist"], tmp_path / "acme" / "done")
    before = contents(tmp_path)
    with pytest.raises(VendorError, match=message):
        vendor.vendor(packages, tmp_path / place)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "", "cannot be read"),
        (lambda text: text.replace('"format_version": 1', '"format_version": 2'), "another format"),
        (
            lambda text: text.replace("dist/errors.py", "../../own.py"),
            "own.py' is not in the folder",
        ),
        (lambda text: text.replace('"licence"', '"license"'), "cannot be read: .*licen"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(into, damage, message):
    vendor.vendor(["dist"], into)
    path = into / "scaletorch" / NAME
    path.write_text(damage(path.read_text()))
    for act in (vendor.check, vendor.update):
        with pytest.raises(VendorError, match=message):
            act(into)


def test_files_that_the_projects_git_ignores_are_told(into, capsys):
    git = ["git", "-c", "init.defaultBranch=main", "init", "-q", str(into.parent)]
    subprocess.run(git, check=True)
    rules = into.parent / ".gitignore"
    rules.write_text("dist/\n")
    assert vendor.main(["--packages", "dist", "--into", str(into)]) == 0
    told = capsys.readouterr().out
    assert "warning: git ignores" in told
    assert vendor.main(["--check", "--into", str(into)]) == 1
    assert "ignored by git: dist/__init__.py" in capsys.readouterr().out
    rule = re.search(r"![*]\S+", told).group()
    rules.write_text(f"dist/\n{rule}\n")  # as the warning says
    assert vendor.main(["--check", "--into", str(into)]) == 0


def test_the_manifest_says_where_a_copy_comes_from(into):
    vendor.vendor(["dist"], into)
    manifest = json.loads((into / "scaletorch" / NAME).read_text())
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    assert (manifest["commit"] or "").removesuffix("+") == head
    assert manifest["asked"] == ["scaletorch-dist"]


@pytest.mark.timeout(400)
def test_the_guides_project_runs_and_mypy_checks_it(into):
    host = into.parent.parent
    commands = [line.split() for line in guides("bash").splitlines()]
    assert [command[:3] for command in commands] == [["python", "-m", "tools.vendoring"]] * 3
    for command in commands:
        words = [str(into) if word == PLACE else word for word in command[3:]]
        assert vendor.main(words) == 0, command
    (host / "acme" / "__init__.py").touch()
    (host / "acme" / "train.py").write_text(guides("py"))
    # Torch takes mypy a minute to read; the two errors are in calls of ours.
    torch = '\n[[tool.mypy.overrides]]\nmodule = "torch.*"\nfollow_imports = "skip"\n'
    (host / "pyproject.toml").write_text(guides("toml") + torch)
    run = {"cwd": host, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-m", "acme.train"], **run, check=False)
    assert done.stdout == "True\n", done.stderr
    wrong = ['    launch(work, "two", 4)', "    setup_process_group_manager().no_such_attribute"]
    (host / "acme" / "train.py").write_text("\n".join([guides("py").rstrip(), *wrong, ""]))
    done = subprocess.run([sys.executable, "-m", "mypy", "acme"], **run, check=False)
    first = guides("py").rstrip().count("\n") + 2
    told = [line.split(":")[:3] for line in done.stdout.splitlines()[:-1]]
    assert told == [["acme/train.py", str(first + at), " error"] for at in range(2)], done.stdout

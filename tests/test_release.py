"""A release moves versions, pins and changelogs, and builds what it names."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
from repositories import commit, git
from tools.packages import PACKAGES

ROOT = Path(__file__).resolve().parent.parent
DIST, TP, UMBRELLA = (f"packages/{n}" for n in ("scaletorch-dist", "scaletorch-tp", "scaletorch"))
REPOSITORY = "https://code.invalid/some-one/scaletorch"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A clean repository with the packages, of one commit."""
    folder = tmp_path_factory.mktemp("workspace")
    for name in ("packages", "tools"):
        # Without tests, and without the lines on changes that are pending: each test has its own.
        unwanted = shutil.ignore_patterns(
            "__pycache__", "*.egg-info", "dist-info", "changes", "tests"
        )
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    for name in ("pyproject.toml", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    settle(folder, f'repository = "{REPOSITORY}"')
    commit(folder)
    return folder


def settle(folder, *lines):
    """Write the settings of the workspace."""
    file = folder / "pyproject.toml"
    others = re.sub(r"^(repository|documentation) = .*\n", "", file.read_text(), flags=re.M)
    file.write_text(
        others.replace("[tool.scaletorch]\n", "\n".join(["[tool.scaletorch]", *lines, ""]))
    )


@pytest.fixture(autouse=True)
def clean(workspace):
    """Each test begins with what was committed."""
    yield
    git(workspace, "reset", "-q", "--hard")
    git(workspace, "clean", "-qfdx")


def run(folder, *words, code=0):
    """Run a program there; what it printed."""
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def release(folder, *words, code=0):
    """Run the tool there."""
    return run(folder, sys.executable, "-m", "tools.release", *words, code=code)


def fragment(folder, package, name, text):
    """Write lines for users about a change."""
    (folder / package / "changes").mkdir(exist_ok=True)
    (folder / package / "changes" / name).write_text(text)


def version(folder, package):
    """The version in the sources, which is one, whatever portion is asked."""
    files = (folder / package).glob("src/**/_version.py")
    (found,) = {re.search('__version__ = "(.*)"', file.read_text())[1] for file in files}
    return found


def test_a_minor_version_moves_pins_and_raises_dependents(workspace):
    fragment(workspace, DIST, "+fast.added.md", "Faster.\n")
    extras = workspace / TP / "pyproject.toml"
    extras.write_text(
        extras.read_text().replace("-dist[nccl]", "-dist[nccl]~=0.1.0; python_version>'3'")
    )
    commit(workspace)
    said = release(workspace, "bump", "minor", "scaletorch-dist", "--date", "2030-01-02")
    assert "scaletorch-tp 0.1.0 -> 0.2.0" in said
    assert 'git tag -a scaletorch-dist-v0.2.0 -m "Release scaletorch-dist-v0.2.0"' in said
    assert [version(workspace, p) for p in (DIST, TP, UMBRELLA)] == ["0.2.0"] * 3
    pins = (workspace / TP / "pyproject.toml").read_text()
    assert '["scaletorch-dist~=0.2.0", "scaletorch-pg~=0.2.0", "torch>=2.10"]' in pins
    assert "scaletorch-dist[nccl]~=0.2.0; python_version>'3'" in pins
    for file in (
        *(workspace / TP).rglob("_version.py"),
        *(workspace / UMBRELLA).rglob("_version.py"),
    ):
        assert '"scaletorch-dist~=0.2.0": dist' in file.read_text()
    text = (workspace / DIST / "CHANGELOG.md").read_text()
    added = "## 0.2.0 (2030-01-02)\n\n### Added\n\n- Faster.\n\n"
    assert f"{added}### Changed\n\n- Needs scaletorch-guard 0.2.\n\n## 0.1.0 (unreleased)" in text
    assert not list((workspace / DIST / "changes").glob("*.md"))
    assert "- Needs scaletorch-dist 0.2." in (workspace / TP / "CHANGELOG.md").read_text()
    built = {file.name for file in (workspace / "dist" / "scaletorch-dist-v0.2.0").iterdir()}
    assert {"scaletorch_tp-0.2.0-py3-none-any.whl", "scaletorch-0.2.0.tar.gz"} <= built
    assert len(built) == said.count("PASSED") == 2 * len(PACKAGES)


def test_a_patch_leaves_pins_and_a_dry_run_everything(workspace):
    before = contents(workspace)
    said = release(workspace, "bump", "patch", "scaletorch-dist", "--dry-run")
    assert '+__version__ = "0.1.1"' in said
    assert "scaletorch-tp 0.1.0 ->" not in said
    assert said.count("PASSED") == 2
    assert contents(workspace) == before


def contents(folder):
    """Every file that git would see, or a build would make."""
    files = (
        f for f in folder.rglob("*") if f.is_file() and not {".git", "__pycache__"} & {*f.parts}
    )
    return {file: file.read_bytes() for file in files}


def test_a_first_release_dates_what_was_written_by_hand(workspace):
    fragment(workspace, TP, "+more.fixed.md", "Fixed.\n")
    (workspace / TP / "CHANGELOG.md").write_text(
        "# Changelog\n\n<!-- towncrier release notes start -->\n\n## 0.1.0 (unreleased)\n\nFirst.\n"
    )
    commit(workspace)
    release(workspace, "bump", "0.1.0", "scaletorch-tp", "--date", "2030-01-02")
    text = (workspace / TP / "CHANGELOG.md").read_text()
    assert text.endswith("-->\n\n## 0.1.0 (2030-01-02)\n\nFirst.\n\n### Fixed\n\n- Fixed.\n")
    commit(workspace)
    assert "is released" in release(workspace, "bump", "0.1.0", "scaletorch-tp", code=1)
    release(workspace, "build", "--into", "dist/out")
    assert {f.suffix for f in (workspace / "dist" / "out").iterdir()} == {".whl", ".gz"}
    git(workspace, "reset", "-q", "--hard", "HEAD~2")


REFUSED = [
    (
        ["bump", "minor", "scaletorch-xp"],
        "unknown: scaletorch-xp; one of scaletorch, scaletorch-cp",
    ),
    (["bump", "0.0.9", "scaletorch-tp"], "scaletorch-tp is at 0.1.0: 0.0.9 would go back"),
    (["bump", "huge", "scaletorch-tp"], "'huge' is none of patch, minor, major and no version"),
    (["bump", "0.2", "scaletorch-tp"], "a version has three numbers"),
    (["build"], "no changelog has a date"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_is_refused(workspace, words, said):
    assert f"no release: {said}" in release(workspace, *words, code=1)


def test_uncommitted_changes_are_refused(workspace):
    (workspace / "new").write_text("new")
    assert "uncommitted changes" in release(workspace, "bump", "minor", "scaletorch-tp", code=1)


def urls(folder):
    """Return package → the addresses in its pyproject."""
    files = sorted((folder / "packages").glob("*/pyproject.toml"))
    found = {file.parent.name: tomllib.loads(file.read_text())["project"] for file in files}
    return {name: project.get("urls", {}) for name, project in found.items()}


def test_all_packages_say_alike_where_they_come_from(workspace):
    assert [*urls(ROOT)] == PACKAGES
    release(workspace, "bump", "patch", "scaletorch-tp", "--date", "2030-01-02")
    for name, addresses in urls(workspace).items():
        assert addresses["Homepage"] == addresses["Repository"] == REPOSITORY
        assert addresses["Issues"] == f"{REPOSITORY}/issues"
        assert addresses["Changelog"] == f"{REPOSITORY}/blob/main/packages/{name}/CHANGELOG.md"
        assert addresses["Documentation"] == f"{REPOSITORY}/tree/main/docs"
    (wheel,) = (workspace / "dist" / "scaletorch-tp-v0.1.1").glob("*.whl")
    with ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("METADATA"))
        lines = archive.read(name).decode().splitlines()
    for label, address in urls(workspace)["scaletorch-tp"].items():
        assert f"Project-URL: {label}, {address}" in lines


def test_addresses_follow_the_settings_and_without_one_nothing_is_built(workspace):
    words = ("bump", "patch", "scaletorch-pg")
    for address, why in {
        "": "no release: the wheels would not say where they come from: give the address",
        'repository = "http://somewhere/"': "repository is 'http://somewhere/'; expected https://",
    }.items():
        settle(workspace, address)
        commit(workspace)
        for refused in (words, ("build", "scaletorch-pg")):
            assert why in release(workspace, *refused, code=1)
    git(workspace, "reset", "-q", "--hard", "HEAD~2")
    release(workspace, *words)
    settle(workspace, 'repository = "https://other.invalid/x"')
    commit(workspace)
    said = release(workspace, "build", "scaletorch-pg", code=1)
    assert "no release: scaletorch-pg has other [project.urls] than pyproject.toml says" in said
    release(workspace, *words)
    assert urls(workspace)["scaletorch-dp"]["Issues"] == "https://other.invalid/x/issues"
    git(workspace, "reset", "-q", "--hard", "HEAD~1")


def test_a_patch_release_takes_no_name_away(workspace):
    file, tag = workspace / DIST / "building.txt", f"scaletorch-dist-v{version(workspace, DIST)}"
    words = ("scaletorch-dist", "--dry-run")
    git(workspace, "tag", tag)
    try:
        kept = file.read_text()
        file.write_text(kept + "\nscaletorch.dist.newer\n    added() -> None\n")
        commit(workspace)
        release(workspace, "bump", "patch", *words)
        line = next(each for each in kept.splitlines() if each.startswith("    all_gather_flat("))
        file.write_text(kept.replace(line + "\n", ""))
        commit(workspace)
        said = release(workspace, "bump", "patch", *words, code=1)
        assert "would lack what" in said
        assert f"scaletorch.dist.building: {line.strip()}" in said
    finally:
        git(workspace, "tag", "-d", tag)
        git(workspace, "reset", "-q", "--hard", "HEAD~2")

"""The checks of built wheels pass a good one and refuse one with each fault."""

import re
import shutil
import zipfile

import pytest
from tools.building import build, of_version
from tools.environments import create, run, torch_alone
from tools.packages import folder, version
from tools.rows import CheckError
from tools.wheels.alone import Alone
from tools.wheels.files import own_files, shared_paths, wrong_files
from tools.wheels.metadata import next_series, own_words, wrong_requirements, wrong_words
from tools.wheels.sdists import sdist

DIST = "scaletorch-dist"
PACKAGE = "scaletorch-pg"
PORTION = "scaletorch/parallel/pg_manager"
ABOUT = f"scaletorch_pg-{version(PACKAGE)}.dist-info"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    into = tmp_path_factory.mktemp("wheels")
    return {package: build(folder(package), into) for package in (DIST, PACKAGE)}


@pytest.fixture(scope="module")
def torch_folder(tmp_path_factory):
    return torch_alone(tmp_path_factory.mktemp("borrowed") / "torch")


def changed(wheel, into, path, old=None, new=None):
    """Copy a wheel with a file gone, changed or, where there is none, added."""
    into.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(into / wheel.name, "w") as target:
        texts = {name: source.read(name).decode() for name in source.namelist()}
        assert old is None or old in texts[path]
        if new is None:
            del texts[path]
        else:
            texts[path] = new if old is None else texts[path].replace(old, new, 1)
        for name, text in texts.items():
            target.writestr(name, text)
    return into / wheel.name


def test_good_wheels_pass(wheels):
    for package, wheel in wheels.items():
        assert "own files with py.typed, LICENSE" in own_files(wheel, package)
        assert version(package) in own_words(wheel, package)
    assert shared_paths(wheels.values()) == []


@pytest.mark.parametrize(
    ("path", "new", "fault"),
    [
        ("scaletorch/__init__.py", "", f"scaletorch/__init__.py lies outside {PORTION}"),
        (f"{PORTION}/stray.py", "", f"{PORTION}/stray.py is no file of the package's sources"),
        (f"{PORTION}/grid.py", None, f"{PORTION}/grid.py is missing"),
        (f"{ABOUT}/licenses/LICENSE", None, "its licenses/LICENSE is not the project's"),
    ],
)
def test_a_wrong_file_is_named(wheels, tmp_path, path, new, fault):
    wheel = changed(wheels[PACKAGE], tmp_path, path, None, new)
    assert any(each.startswith(fault) for each in wrong_files(wheel, PACKAGE))
    with pytest.raises(CheckError, match=fault):
        own_files(wheel, PACKAGE)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("\nVersion: ", "\nVersion: 7", "version is '7"),
        ("Requires-Python: >=3.11", "Requires-Python: >=3.9", "requires_python is '>=3.9'"),
        ("Summary: ", "Maintainer: ", "summary is empty"),
        ("# scaletorch-pg", "# scaletorch-gp", "description is"),
        ("# scaletorch-pg", "[a guide](../guide.md)", "the README links to ../guide.md"),
    ],
)
def test_wrong_words_are_named(wheels, tmp_path, old, new, fault):
    wheel = changed(wheels[PACKAGE], tmp_path, f"{ABOUT}/METADATA", old, new)
    assert any(each.startswith(fault) for each in wrong_words(wheel, PACKAGE))


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("torch>=", "numpy>=", "it requires numpy>=2.10: torch and siblings alone may be"),
        ("scaletorch-dist~=", "scaletorch-dist>=", f"allows scaletorch-dist {next_series(DIST)}"),
        ("scaletorch-dist~=", "scaletorch-dist~=7", f"refuses scaletorch-dist {version(DIST)}"),
        ("scaletorch-dist~=", "scaletorch-dist>=", "at import it checks ['scaletorch-dist~="),
    ],
)
def test_a_wrong_requirement_is_named(wheels, tmp_path, old, new, fault):
    old, new = (f"Requires-Dist: {each}" for each in (old, new))
    wheel = changed(wheels[PACKAGE], tmp_path, f"{ABOUT}/METADATA", old, new)
    assert any(fault in each for each in wrong_requirements(wheel, PACKAGE))


def test_a_path_of_two_wheels_is_named(wheels, tmp_path):
    wheel = changed(wheels[PACKAGE], tmp_path, "scaletorch/dist/errors.py", None, "")
    assert shared_paths([wheel, wheels[DIST]]) == ["scaletorch/dist/errors.py"]


def test_an_sdist_makes_the_same_wheel_and_another_is_refused(wheels, tmp_path):
    assert "same to the byte" in sdist(PACKAGE, wheels[PACKAGE], tmp_path / "same")
    other = changed(wheels[PACKAGE], tmp_path, f"{PORTION}/grid.py", None, "")
    with pytest.raises(CheckError, match="is another"):
        sdist(PACKAGE, other, tmp_path / "other")


def test_a_wheel_is_installed_with_its_siblings_and_imported(wheels, torch_folder, tmp_path):
    python = create(tmp_path / "environment", torch_folder)
    alone = Alone(PACKAGE, wheels[PACKAGE], wheels[PACKAGE].parent, python)
    assert alone.install() == "beside torch brings scaletorch-dist"
    assert int(alone.imports().split()[0]) > 10
    assert "numpy" in run(python, "-c", "import numpy", folder=tmp_path).stderr


def test_a_wheel_that_needs_more_is_not_installed(wheels, torch_folder, tmp_path):
    python = create(tmp_path / "environment", torch_folder)
    old, new = "Requires-Dist: torch", "Requires-Dist: numpy\nRequires-Dist: torch"
    wheel = changed(wheels[PACKAGE], tmp_path / "wheels", f"{ABOUT}/METADATA", old, new)
    shutil.copy(wheels[DIST], wheel.parent)
    alone = Alone(PACKAGE, wheel, wheel.parent, python)
    with pytest.raises(CheckError, match="numpy"):
        alone.install()


def test_a_snippet_that_prints_something_else_is_named(wheels, torch_folder, tmp_path):
    told = "```python\nprint(1)\n```\n\n```python\nprint(2)\n```\n\n```output\n3\n```\n"
    own = (folder(PACKAGE) / "README.md").read_text()
    wheel = changed(wheels[PACKAGE], tmp_path / "wheels", f"{ABOUT}/METADATA", own, told)
    alone = Alone(PACKAGE, wheel, wheel.parent, create(tmp_path / "environment", torch_folder))
    with pytest.raises(CheckError, match=r"snippet2 fails:\n2"):
        alone.readme()


def test_wheels_of_two_patch_releases_fit_together(wheels, torch_folder, tmp_path):
    major, minor, patch = version(DIST).split(".")
    newer = of_version(DIST, f"{major}.{minor}.{int(patch) + 1}", tmp_path)
    inside = newer / "src/scaletorch/dist"
    (inside / "collectives").rename(inside / "moved_inside")
    for file in inside.rglob("*.py"):
        imports = re.compile(r"^(\s*from [.]+)collectives\b", re.M)
        file.write_text(imports.sub(r"\1moved_inside", file.read_text()))
    folder_of_both = tmp_path / "both"
    folder_of_both.mkdir()
    build(newer, folder_of_both)
    shutil.copy(wheels[PACKAGE], folder_of_both)
    python = create(tmp_path / "environment", torch_folder)
    alone = Alone(PACKAGE, wheels[PACKAGE], folder_of_both, python)
    alone.install()
    assert int(alone.imports().split()[0]) > 10

"""tools/vendoring: what it copies, what it refuses, what it leaves alone, and whether it works."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from tools import vendoring
from tools.packages import PACKAGES
from tools.vendoring import LICENCE, NAME, VendorError, contents, main, update, vendor

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


def test_a_copy_has_what_the_wheels_have(into):
    manifest = vendor(["scaletorch"], into)
    wheels = {
        file.distribution_path.removeprefix("scaletorch/")
        for name in PACKAGES
        for file in WheelBuilder(str(ROOT / "packages" / name)).recurse_included_files()
    }
    assert manifest["files"].keys() == wheels | {LICENCE}
    assert contents(into / "scaletorch") == {*manifest["files"], NAME}
    assert json.loads((into / "scaletorch" / NAME).read_text()) == manifest
    assert sorted(manifest["versions"]) == PACKAGES
    assert (manifest["licence"], manifest["requires"]) == ("MIT", ["torch>=2.10"])
    assert not list(into.glob("*.py")), "the project's own folders stay as they are"


def test_only_what_is_needed_is_copied(into):
    manifest = vendor(["tp", "scaletorch-cp"], into)
    assert list(manifest["versions"]) == [f"scaletorch-{n}" for n in ("cp", "dist", "pg", "tp")]
    found = {path.name for path in (into / "scaletorch" / "parallel").iterdir()}
    assert found == {"context_parallel", "pg_manager", "placement", "tensor_parallel"}
    update(into, ["pg"])
    found = {name.split("/")[1] for name in contents(into / "scaletorch") if "parallel/" in name}
    assert found == {"pg_manager", "placement"}


def test_own_files_stay_and_changes_are_named(into, capsys):
    vendor(["dist"], into)
    copy = into / "scaletorch"
    (copy / "dist" / "own.py").write_text("mine\n")
    assert update(into)
    assert (copy / "dist" / "own.py").read_text() == "mine\n"
    (copy / "dist" / "errors.py").write_text("edited\n")
    (copy / "dist" / "public.py").unlink()
    before = contents(copy)
    assert main(["--check", "--into", str(into)]) == 1
    lines = ["edited: dist/errors.py", "missing: dist/public.py", "stray: dist/own.py"]
    assert capsys.readouterr().out.splitlines()[:3] == lines
    assert main(["--update", "--into", str(into)]) == 1
    assert re.search("was changed since .*edited: dist/err", capsys.readouterr().err, re.DOTALL)
    assert contents(copy) == before


def test_an_update_overwrites_nothing_and_news_are_told(into, monkeypatch):
    vendor(["dist"], into)
    own = into / "scaletorch" / "parallel" / "pg_manager" / "__init__.py"
    own.parent.mkdir(parents=True)
    own.write_text("mine\n")
    with pytest.raises(VendorError, match=r"not of the copy.*move them away: \S*__init__.py"):
        update(into, ["pg"])
    assert own.read_text() == "mine\n"
    monkeypatch.setattr(vendoring, "version", lambda name: "9.9")
    assert re.match(r"scaletorch-dist 9\.9 is in this clone, and \d", vendoring.check(into)[1][0])


REFUSED = {
    ("acme/_vendor", "tq"): "there is no package 'tq': .* cp, dist, dp, ep, guard, pg",
    ("acme/third-party", "tp"): "'third-party' is no name that Python can import",
    ("acme/import", "tp"): "'import' is no name",
    ("acne/_vendor", "tp"): "acne is no folder",
    ("acme/full", "tp"): "full/scaletorch exists; move it away",
    ("acme/done", "tp"): "done/scaletorch exists; it is a vendored copy: --update it",
}


def test_places_that_will_not_do_are_refused(tmp_path):
    (tmp_path / "acme" / "full" / "scaletorch").mkdir(parents=True)
    vendor(["dist"], tmp_path / "acme" / "done")
    before = contents(tmp_path)
    for (place, package), message in REFUSED.items():
        with pytest.raises(VendorError, match=message):
            vendor([package], tmp_path / place)
    assert contents(tmp_path) == before


def test_a_manifest_that_makes_no_sense_is_refused(into):
    vendor(["dist"], into)
    for text in ("", "{}", '{"files": {"../../own.py": ""}}'):
        (into / "scaletorch" / NAME).write_text(text)
        for act in (vendoring.check, update):
            with pytest.raises(VendorError, match="cannot be read"):
                act(into)


@pytest.mark.timeout(400)
def test_the_guides_project_runs_and_mypy_checks_it(into):
    host = into.parent.parent
    commands = [line.split() for line in guides("bash").splitlines()]
    assert [command[:3] for command in commands] == [["python", "-m", "tools.vendoring"]] * 3
    for command in commands:
        words = [str(into) if word == PLACE else word for word in command[3:]]
        assert main(words) == 0, command
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

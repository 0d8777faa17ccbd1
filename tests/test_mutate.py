"""Random mutants: the same for the same seed, one place each, judged by the tests that run it."""

import ast
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

from mutation import hunt as hunting
from mutation import planted, scope, tree
from mutation.draw import all_places, draw
from mutation.hunt import Hunt, go, read
from mutation.places import changed, places
from mutation.show import latest, show
from mutation.verdict import _read
from repositories import commit
from sweeps import today

ROOT = Path(__file__).resolve().parent.parent

TOY = '''"""Numbers."""

START = 1


def add(a: int = 2, b: int = 3) -> int:
    """Sum, from 1."""
    if a < 0:
        raise ValueError(f"expected {a + 1}")
    log(a)
    return a + b + START


def log(a: int) -> None:
    if a > 99:
        print(-a)


def spin(n: int) -> int:
    while n != 0:
        n = n - 1
    return n
'''

TESTS = """
import time

import pytest
import toy

class Slow(int):  # so that a loop that never ends keeps no core busy
    def __add__(self, other):
        time.sleep(0.05)
        return Slow(int(self) + other)

    def __sub__(self, other):
        return self + -other

def test_add():
    assert toy.add(1, 4) == 6

def test_spin():
    assert toy.spin(Slow(2)) == 0
"""

SKIPPED = """
@pytest.mark.skip(reason="not today")
def test_skipped():
    assert toy.spin(2) == 0
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A repository with one small package; where its hunt is kept."""
    root = tmp_path / "root"
    for name, text in {
        "packages/toy/src/toy.py": TOY,
        "packages/toy/tests/test_toy.py": TESTS,
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = ["--import-mode=importlib"]\n',
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    commit(root)
    monkeypatch.setattr(scope, "SOURCES", ("packages/toy/src",))
    monkeypatch.setattr(scope, "PRELOAD", ("torch.distributed", "pytest", "hypothesis"))
    return Hunt(root, tmp_path / "out", hunting.resolve(root, "HEAD"), 1, 100, 2, 0)


def test_every_place_of_the_sources_changes_one_thing_and_no_line_number():
    files = tree.sources(ROOT)
    assert len(files) > 100
    for file in today(files, 30):
        source = (ROOT / file).read_bytes()
        plain = ast.dump(ast.parse(source))
        for place in places(file, source):
            assert source[place.start : place.end].decode() == place.before
            for choice in place.choices:
                mutated = changed(source, place, choice)
                assert mutated.count(b"\n") == source.count(b"\n"), place
                rest = mutated[: place.start] + mutated[place.start + len(choice.encode()) :]
                assert rest == source[: place.start] + source[place.end :], place
    assert ast.dump(ast.parse(changed(source, place, choice))) != plain


def test_a_seed_draws_the_same_mutants_and_another_seed_others():
    found = all_places(ROOT, tree.sources(ROOT)[:20])
    assert draw(found, 7, 40) == draw(found, 7, 40)
    assert draw(found, 7, 40)[:10] == draw(found, 7, 10)
    assert draw(found, 7, 40) != draw(found, 8, 40)
    assert len({m.place for m in draw(found, 7, len(found))}) == len(found)


def test_what_is_left_out():
    assert not [f for f in tree.sources(ROOT) if "__init__" in f or "drawing" in f]
    assert not [f for f in tree.tests(ROOT) if "test_guard" in f]
    for pattern in scope.TESTS_LEFT_OUT:  # each still leaves something out
        assert any(ROOT.glob(pattern.replace("*/", "packages/*/tests/", 1))), pattern


def test_a_hunt_goes_on_where_it_was_ended(toy, monkeypatch):
    monkeypatch.setattr("mutation.choose.LEAST", 2.0)
    monkeypatch.setattr("mutation.verdict.START", 5.0)
    monkeypatch.setattr("mutation.verdict.AGAIN", 2.0)
    said = []
    go(replace(toy, count=4), said.append)
    with toy.results.open("a") as file:
        file.write('{"mutant": 5, "cut sho')
    before = read(toy)
    go(toy, said.append)
    assert read(toy)[: len(before)] == before
    assert sum(text.startswith("measured") for text in said) == 1
    fates = latest(read(toy))
    assert len(fates) == 16
    by_place = {(e["line"], e["before"]): (e["verdict"], e["by"].partition("::")[2]) for e in fates}
    assert by_place[11, "+"] == ("caught", "test_add")
    assert by_place[8, "<"][0] in ("caught", "survived")  # <= survives, >= does not
    assert by_place[10, "log(a)"] == ("survived", "")
    assert by_place[16, "-a"] == ("not run", "")
    assert by_place[20, "!="] == ("caught", "test_spin")
    assert by_place[21, "-"] == ("caught", "test_spin")  # it never ends
    text = show(read(toy), toy.commit, toy.seed)
    assert "toy.py:10 call 'log(a)' -> 'pass': survived 1 of 1 tests" in text
    assert text.endswith("%")
    assert TOY in [(p / "packages/toy/src/toy.py").read_text() for p in toy.out.glob("tree-*")]
    with pytest.raises(ValueError, match="name another folder"):
        go(replace(toy, seed=2), said.append)


def test_a_mutant_that_keeps_tests_from_loading_is_caught():
    unloaded = [{"status": pytest.ExitCode.USAGE_ERROR, "seconds": 1.0}]
    found = _read(unloaded, True, {"test_toy.py::test_add": 1.0})
    assert (found.verdict, found.how) == ("caught", "dies")


PLANT = planted.Plant(
    "negative", "a fault", "packages/toy/src/toy.py", "return a + b", "return a - b", ""
)


UNRUN = [  # what is written, and the test that is asked
    ("test_toy.py", TESTS + SKIPPED, "test_skipped"),
    ("conftest.py", "raise ImportError", "test_add"),
]


@pytest.mark.parametrize(
    ("file", "text", "test"), [("test_toy.py", TESTS, "test_add"), *today(UNRUN, 3)]
)
def test_no_fault_survives_a_test_that_does_not_run(toy, monkeypatch, file, text, test):
    folder = "packages/toy/tests"
    (toy.root / folder / file).write_text(text)
    commit(toy.root)
    plant = replace(PLANT, test=f"{folder}/test_toy.py::{test}")
    monkeypatch.setattr(planted, "plants", lambda: [plant])
    hunt, heard = replace(toy, commit=hunting.resolve(toy.root, "HEAD")), []
    if (file, test) == ("test_toy.py", "test_add"):
        assert planted.hunt(hunt, (), heard.append)
        assert heard[-1] == "1 of 1 planted faults caught"
    else:
        with pytest.raises(ValueError, match="run not at all"):
            planted.hunt(hunt, (), heard.append)

"""The plugin of pytest, in projects that know nothing of this one."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import scaletorch.dist.testing  # noqa: F401 - pytester forgets what is first imported inside of it

pytest_plugins = ["pytester"]

PLUGIN = "scaletorch.pytest_ranks.plugin"

PASSING = """
import os
import unittest

import pytest
import torch
import torch.distributed as dist
from helpers import Pair
from hypothesis import given, settings, strategies as st

drawn = []


def total(x, offset=0):
    data = torch.tensor(x * (dist.get_rank() + 1))
    dist.all_reduce(data)
    return data.item() + offset


@pytest.mark.ranks(2)
def test_fixtures_reach_ranks(three, tmp_path):
    assert total(three) == 9
    (tmp_path / str(dist.get_rank())).touch()


@pytest.mark.parametrize("pair", [Pair(1, 10), Pair(2, 20)], ids=str)
@pytest.mark.ranks(2, 3)
def test_sizes(pair):
    size = dist.get_world_size()
    assert total(pair.left) * 10 == total(pair.right) == pair.right * size * (size + 1) // 2


@pytest.mark.ranks(1)
class TestOfAClass:
    def test_the_nearest_marker_counts_and_this_is_it(self):
        assert dist.get_world_size() == 1

    @pytest.mark.ranks(2, init=False, env={"COLOUR": "blue"})
    def test_or_this(self):
        assert not dist.is_initialized() and os.environ["WORLD_SIZE"] == "2"
        assert os.environ["COLOUR"] == "blue"


@pytest.mark.ranks(2)
@settings(max_examples=7, deadline=None, database=None)
@given(x=st.integers(0, 9))
def test_examples_are_drawn_once_for_all_ranks(x):
    drawn.append(x)
    examples = [None] * 2
    dist.all_gather_object(examples, drawn)
    assert examples[0] == examples[1] and len(drawn) <= 7
    assert total(x) == 3 * x


def test_examples_were_drawn_here_and_used_there():
    assert drawn == []


@pytest.mark.parametrize("size", [pytest.param(3, marks=pytest.mark.ranks(3)), 0])
def test_a_parameter_may_have_the_marker(size):
    assert size == (dist.get_world_size() if dist.is_initialized() else 0)


@pytest.mark.ranks(2)
def test_skips_where_all_ranks_skip():
    pytest.skip("as planned")


def test_results_of_all_ranks(ranks):
    assert ranks.run(total, 2, 5, offset=1, timeout=30) == [16, 16]
    with pytest.raises(ValueError, match="move it to module level"):
        ranks.run(lambda: None, 2)
    ranks.preload("colorsys")


def test_without_a_marker_is_as_ever():
    assert not dist.is_initialized()
"""

FAILING = """
import time
import pytest
import torch.distributed as dist


@pytest.mark.ranks(2)
def test_wrong_values(tmp_path):
    assert [dist.get_rank(), 7] == [dist.get_rank(), 8], "of this rank"


@pytest.mark.ranks(2, timeout=1)
def test_hangs():
    if dist.get_rank() == 1:
        time.sleep(60)  # the line where it hangs


@pytest.mark.ranks(2)
def test_a_file(handle):
    pass


@pytest.mark.ranks(2)
def test_patches(monkeypatch):
    pass


@pytest.mark.ranks(2)
def test_ranks_of_ranks(ranks):
    pass


@pytest.mark.ranks(2)
async def test_async():
    pass


@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.ranks(2, 3))])
def test_several_on_a_parameter(x):
    pass


@pytest.mark.ranks(2)
class TestOfUnittest(__import__("unittest").TestCase):
    def test_it(self):
        raise RuntimeError("ran in one process")


def test_needs_the_umbrella(assert_trains_alike):
    pass
"""

CONFTEST = """
import pytest


@pytest.fixture
def three():
    return 3


@pytest.fixture
def handle(tmp_path):
    with open(tmp_path / "file", "w") as file:
        yield file
"""

HELPERS = (
    "from typing import NamedTuple\n\nclass Pair(NamedTuple):\n    left: int\n    right: int\n"
)


@pytest.fixture
def run(pytester):
    """Run pytest in this process, in a folder of its own, and return what it says."""

    def run_in(source, *options):
        pytester.makeconftest(CONFTEST)
        pytester.makepyfile(helpers=HELPERS, test_mine=source)
        usual = ("-p", PLUGIN, "-p", "no:cacheprovider", "--strict-markers", "-rA")
        return pytester.runpytest_inprocess(*usual, *options)

    return run_in


def test_a_project_whose_tests_pass(run):
    result = run(PASSING)
    result.assert_outcomes(passed=13, skipped=1)
    for line in (
        "PASSED test_mine.py::test_sizes[2ranks-Pair(left=1, right=10)]",
        "PASSED test_mine.py::test_sizes[3ranks-Pair(left=2, right=20)]",
        "as planned",
    ):
        assert line in result.stdout.str()


def test_what_fails_hangs_or_cannot_be_sent_is_told_in_words(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "scaletorch.verify", None)
    result = run(FAILING)
    result.assert_outcomes(failed=3, errors=6)
    text = result.stdout.str()
    for words in (
        "test_wrong_values on 2 ranks: ranks ",
        "assert [0, 7] == [0, 8]",
        "assert [1, 7] == [1, 8]",
        "test_hangs on 2 ranks: rank 1 had not finished after 1 s; rank 0 finished",
        "--- rank 1 was still at ---",
        'test_mine.py", line 14 in test_hangs',
        "cannot be sent to ranks: cannot pickle '_io.TextIOWrapper'",
        "test_mine.py::test_patches cannot run on ranks: its fixture monkeypatch acts in",
        "with pytest.MonkeyPatch.context()",
        "its fixture ranks acts in pytest's process alone: use it in a test without the marker",
        "test_mine.py::test_async cannot run on ranks: it is async: call asyncio.run()",
        "several numbers of ranks must stand above the test, its class or its file",
        "TestOfUnittest::test_it cannot run on ranks: ranks can only run test functions",
        "needs the package scaletorch, which is not installed: pip install scaletorch",
    ):
        assert words in text, words
    assert "def collect(" not in text, "frames of the library hide what matters"
    assert "ran in one process" not in text


def test_what_is_collected(pytester):
    wrong = {
        "ranks()": "the marker needs numbers of ranks, such as ranks(2), and has ()",
        "ranks(2, 0)": "the marker needs numbers of ranks, such as ranks(2), and has (2, 0)",
        "ranks('2')": "the marker needs numbers of ranks, such as ranks(2), and has ('2')",
        "ranks(2, size=3)": "the marker takes timeout, init, env, backend, and has size",
    }
    form = "import pytest\n\n@pytest.mark.{}\ndef test_it():\n    pass\n"
    files = {f"test_wrong_{at}": form.format(marker) for at, marker in enumerate(wrong)}
    pytester.makepyfile(**files, test_right=form.format("ranks(2, 4)"))
    result = pytester.runpytest_inprocess("-p", PLUGIN, "--collect-only", "-q", "-k", "4ranks")
    result.stdout.fnmatch_lines(["test_right.py::test_it[[]4ranks]", "*1/2 tests collected*4 err*"])
    for at, words in enumerate(wrong.values()):
        where = f"test_wrong_{at}.py::test_it cannot run on ranks: "
        assert where + words in result.stdout.str()


def test_pytest_finds_it_and_starts_without_torch(tmp_path):
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    # `-p` knows a plugin by its module, and loads it once if the entry point has that name too.
    assert project["project"]["entry-points"] == {"pytest11": {PLUGIN: PLUGIN}}
    assert project["project"]["optional-dependencies"]["pytest"] == ["pytest>=8"]
    (tmp_path / "test_it.py").write_text(
        "import sys\n\ndef test_it(request, ranks):\n"
        "    assert request.config.pluginmanager.has_plugin('scaletorch.pytest_ranks.plugin')\n"
        "    heavy = {'torch', 'numpy', 'scaletorch.dist'}\n"
        "    assert not heavy & set(sys.modules)\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "-q"]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([*command, "."], cwd=tmp_path, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

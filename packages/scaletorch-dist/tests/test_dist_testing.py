"""Test ranks: the decorator, reuse between calls, and what a failed assert shows."""

import gc
import importlib
import operator
import os
import sys
import warnings

import pytest
import torch
import torch.distributed as c10d
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletorch.dist import RankFailedError, RankPool, StateError, launch
from scaletorch.dist.ranks import locate, process
from scaletorch.dist.testing import distributed_test, preload, run_ranks


def pid():
    return os.getpid()


def leave_group():
    c10d.new_group([0, 1])
    return os.getpid()


def add(x):
    data = torch.tensor(x)
    c10d.all_reduce(data)
    return data.item()


def compare(left):
    right = c10d.get_rank()
    assert left == right


def variable():
    return os.environ.get("MASTER_PORT"), os.environ.get("COLOUR")


class OddWarning(UserWarning):
    pass


def warn(text, category=UserWarning):
    warnings.warn(text, category, stacklevel=1)
    return text


def actions():
    return [action for action, *_ in warnings.filters]


@pytest.fixture
def number():
    return 4


@pytest.mark.parametrize("factor", [1, 3])
@distributed_test(world_size=2)
def test_the_decorator_keeps_parameters_and_fixtures(factor, number):
    data = torch.tensor([factor * number])
    c10d.all_reduce(data)
    assert data.item() == 2 * factor * number


@distributed_test(world_size=2)
def skip_everywhere():
    pytest.skip("as planned")


@distributed_test(world_size=2)
def skip_on_one():
    if c10d.get_rank() == 1:
        pytest.skip("as planned")


def test_a_test_is_skipped_when_every_rank_skips():
    with pytest.raises(pytest.skip.Exception, match="as planned"):
        skip_everywhere()
    with pytest.raises(RankFailedError, match="rank 1 failed; rank 0 finished"):
        skip_on_one()


@distributed_test(world_size=2, init=False, env={"COLOUR": "blue"})
def test_the_decorator_passes_options_on():
    assert not c10d.is_initialized()
    assert os.environ["COLOUR"] == "blue"


@settings(max_examples=5, deadline=None)
@given(x=st.integers(-1000, 1000))
@distributed_test(world_size=2)
def test_a_property_of_a_distributed_body(x):
    assert add(x) == 2 * x


def test_ranks_are_reused_while_that_is_safe():
    first = run_ranks(pid, 2)
    assert run_ranks(pid, 2) == first
    used = run_ranks(leave_group, 2)
    assert used == first
    assert not set(run_ranks(pid, 2)) & set(first)


def test_a_failed_assert_shows_its_values_and_its_ranks_are_not_reused():
    first = run_ranks(pid, 2)
    with pytest.raises(RankFailedError, match="rank 1 failed; rank 0 finished") as caught:
        run_ranks(compare, 2, 0)
    assert "assert 0 == 1" in str(caught.value)
    assert not set(run_ranks(pid, 2)) & set(first)


def fail_alike_but_for_one(size, experts):
    rank = torch.distributed.get_rank()
    if rank == 1:
        raise KeyError("of its own")
    place = f"dp{rank} pp0 cp0 tp0{experts.format(rank)}"
    raise ValueError(f"rank {rank} ({place}): {size} layers are too few")


@pytest.mark.parametrize("experts", ["", " edp0 ep{} etp0"])
def test_ranks_that_fail_alike_have_one_traceback(experts):
    with pytest.raises(RankFailedError) as caught:
        run_ranks(fail_alike_but_for_one, 4, 2, experts)
    text = str(caught.value)
    assert text.count("Traceback") == 2
    assert "--- ranks 0, 2, 3 failed ---" in text
    assert "--- rank 1 failed ---" in text
    assert text.count("2 layers are too few") == 1
    assert set(caught.value.failures) == {0, 1, 2, 3}
    assert "rank 3 (dp3" in caught.value.failures[3]


def test_ranks_see_the_environment_of_the_moment(monkeypatch):
    assert run_ranks(variable, 2)[0] == (None, None)
    monkeypatch.setenv("COLOUR", "red")
    assert run_ranks(variable, 2)[0] == (None, "red")
    port, colour = run_ranks(variable, 2, init=False, env={"COLOUR": None})[0]
    assert port is not None
    assert colour is None


def use_a_group_of_two():
    group = c10d.new_group([0, 1], use_local_synchronization=True)
    data = torch.ones(1)
    c10d.all_reduce(data, group=group)
    c10d.destroy_process_group(group)
    return os.getpid(), data.item()


def test_equal_groups_of_two_runs_do_not_meet():
    first = run_ranks(use_a_group_of_two, 2)
    assert run_ranks(use_a_group_of_two, 2, timeout=20) == first


def change_declared_state():
    module = sys.modules[__name__]
    module.__rank_state__ = lambda: "changed"
    return os.getpid()


def test_modules_may_declare_state_of_their_own():
    first = run_ranks(change_declared_state, 2)
    assert not set(run_ranks(pid, 2)) & set(first)


def test_ranks_meet_the_warning_filters_of_the_moment():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_ranks(warn, 2, "a word") == ["a word"] * 2
        warnings.filterwarnings("error", message="another")
        assert run_ranks(warn, 2, "a word") == ["a word"] * 2
        with pytest.raises(RankFailedError, match="UserWarning: Another word"):
            run_ranks(warn, 2, "Another word")
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.filterwarnings("ignore", category=OddWarning)  # of a file of tests: found there
        warnings.filterwarnings("error", module="elsewhere", append=True)
        assert run_ranks(warn, 2, "a word", OddWarning) == ["a word"] * 2
        assert run_ranks(actions, 2) == [["ignore", "error"]] * 2


def test_warnings_are_errors_on_ranks_as_in_this_process():
    with pytest.raises(UserWarning, match="a word"):
        warn("a word")
    with pytest.raises(RankFailedError, match="UserWarning: a word"):
        run_ranks(warn, 2, "a word")


def test_filters_of_unknown_categories_and_of_python_itself_are_taken_as_they_can_be():
    class Local(UserWarning):
        pass

    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.filterwarnings("error", category=Local)  # does not pickle: no rank can have it
        warnings.filters.append(("error", None, UserWarning, "__main__", 0))  # as Python's own are
        assert run_ranks(actions, 2) == [["error"]] * 2
        assert run_ranks(warn, 2, "elsewhere") == ["elsewhere"] * 2


def frozen_objects():
    return gc.get_freeze_count(), "xmlrpc.client" in sys.modules


def test_what_is_preloaded_is_shared_with_ranks():
    """The collector of a rank would write to every page of what it looks through."""
    [(before, known)] = launch(frozen_objects, 1)
    assert not known
    preload("xmlrpc.client")
    [(after, known)] = launch(frozen_objects, 1)
    assert known
    assert after > before + 100
    preload("xmlrpc.client")
    assert launch(frozen_objects, 1) == [(after, True)]


def test_what_is_preloaded_is_found_on_the_path_of_now(tmp_path, monkeypatch):
    run_ranks(frozen_objects, 1)  # the server began before
    (tmp_path / "preloaded_later.py").write_text("")
    with pytest.raises(StateError, match="No module named 'preloaded_later'"):
        preload("preloaded_later")
    monkeypatch.syspath_prepend(tmp_path)
    preload("preloaded_later")


PRELOADING = """
from scaletorch.dist.ranks import process
from scaletorch.dist.testing import preload

preload("xmlrpc.client")

def has_a_server():
    return process._server is not None

class Argument:
    pass
"""


@pytest.mark.parametrize("importable", [True, False])
def test_a_rank_that_imports_a_file_starts_no_server_for_what_it_preloads(
    tmp_path, monkeypatch, importable
):
    """Each rank would import torch, and all that is named, once more."""
    file = tmp_path / f"preloading_{importable}.py"
    file.write_text(PRELOADING)
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module(file.stem).has_a_server
    if not importable:
        monkeypatch.undo()
    assert function()
    assert run_ranks(function, 2) == [False, False]


def has_a_server_with(argument):
    return process._server is not None


def test_a_rank_that_imports_a_file_of_its_arguments_starts_no_server_either(tmp_path, monkeypatch):
    (tmp_path / "preloading_argument.py").write_text(PRELOADING)
    monkeypatch.syspath_prepend(tmp_path)
    argument = importlib.import_module("preloading_argument").Argument()
    assert run_ranks(has_a_server_with, 1, argument) == [False]


def test_a_function_of_a_file_that_no_path_leads_to_may_be_an_argument(monkeypatch):
    """As of a test file, whose folders are on the path under `python -m pytest` alone."""
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", os.getcwd())])
    with RankPool(1) as pool:  # whose rank has not loaded this file
        assert pool.run(operator.call, variable)[0][0] is None


def test_a_function_is_found_where_it_is_loaded_already():
    """Another module of this name would make its functions unpicklable."""
    assert locate.locate(pid).find() is pid


def test_asserts_of_a_file_that_pytest_has_not_read_explain_themselves(tmp_path):
    file = tmp_path / "new.py"
    file.write_text("def wrong(x):\n    assert x == [1, 2]\n")
    found = {}
    exec(locate._explaining_code(str(file)), found)
    with pytest.raises(AssertionError, match=r"(?s)assert \[1, 3\] == \[1, 2\].*3 != 2"):
        found["wrong"]([1, 3])

"""Test ranks: reuse between calls, what a failed assert shows, and comparisons of tensors."""

import gc
import importlib
import math
import operator
import os
import sys
import warnings

import pytest
import torch
import torch.distributed as c10d

from scaletorch.dist import InvalidArgumentError, RankFailedError, RankPool, StateError, launch
from scaletorch.dist.ranks import locate
from scaletorch.dist.testing import distributed_test, preload, relative_error, run_ranks, worst


def leave_group():
    c10d.new_group([0, 1])
    return os.getpid()


def compare(left):
    right = c10d.get_rank()
    assert left == right


class OddWarning(UserWarning):
    pass


def warn(text, category=UserWarning):
    warnings.warn(text, category, stacklevel=1)
    return text


def actions():
    return [action for action, *_ in warnings.filters]


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


def test_ranks_are_reused_while_that_is_safe():
    first = run_ranks(os.getpid, 2)
    assert run_ranks(os.getpid, 2) == first
    used = run_ranks(leave_group, 2)
    assert used == first
    assert not set(run_ranks(os.getpid, 2)) & set(first)


def test_a_failed_assert_shows_its_values_and_its_ranks_are_not_reused():
    first = run_ranks(os.getpid, 2)
    with pytest.raises(RankFailedError, match="rank 1 failed; rank 0 finished") as caught:
        run_ranks(compare, 2, 0)
    assert "assert 0 == 1" in str(caught.value)
    assert not set(run_ranks(os.getpid, 2)) & set(first)


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
    assert run_ranks(os.getenv, 2, "COLOUR") == [None] * 2
    monkeypatch.setenv("COLOUR", "red")
    assert run_ranks(os.getenv, 2, "COLOUR") == ["red"] * 2
    assert run_ranks(os.getenv, 2, "COLOUR", init=False, env={"COLOUR": None}) == [None] * 2


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
    assert not set(run_ranks(os.getpid, 2)) & set(first)


def test_ranks_meet_the_warning_filters_of_the_moment():
    class Local(UserWarning):
        pass

    with pytest.raises(RankFailedError, match="UserWarning: a word"):
        run_ranks(warn, 2, "a word")  # by pytest's own filters
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_ranks(warn, 2, "a word") == ["a word"] * 2
        warnings.filterwarnings("error", message="another")
        with pytest.raises(RankFailedError, match="UserWarning: Another word"):
            run_ranks(warn, 2, "Another word")
        warnings.resetwarnings()
        warnings.filterwarnings("ignore", category=OddWarning)  # of a file of tests: found there
        warnings.filterwarnings("error", module="elsewhere", append=True)
        warnings.filterwarnings("error", category=Local)  # does not pickle: no rank can have it
        assert run_ranks(warn, 2, "a word", OddWarning) == ["a word"] * 2
        assert run_ranks(actions, 2) == [["ignore", "error"]] * 2
        warnings.resetwarnings()
        warnings.filters.append(("error", None, UserWarning, "__main__", 0))  # as Python's own are
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
"""


def test_a_rank_that_imports_a_file_starts_no_server_for_what_it_preloads(tmp_path, monkeypatch):
    """Each rank would import torch, and all that is named, once more."""
    (tmp_path / "preloading.py").write_text(PRELOADING)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("preloading")
    assert module.has_a_server()
    assert run_ranks(module.has_a_server, 2) == [False, False]


def test_a_function_of_a_file_that_no_path_leads_to_may_be_an_argument(monkeypatch):
    """As of a test file, whose folders are on the path under `python -m pytest` alone."""
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", os.getcwd())])
    with RankPool(1) as pool:  # whose rank has not loaded this file
        assert pool.run(operator.call, actions)[0] is not None


def test_a_function_is_found_where_it_is_loaded_already():
    """Another module of this name would make its functions unpicklable."""
    assert locate.locate(actions).find() is actions


NAN = float("nan")


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf, -1.0])
def test_the_worst_error_is_infinite_wherever_one_is_no_error(bad):
    assert worst([1e-16, 3e-16, 2e-16]) == 3e-16
    for place in range(3):
        errors = [1e-16, 2e-16, 3e-16]
        errors[place] = bad
        assert worst(errors) == worst(map(torch.tensor, errors)) == math.inf
    with pytest.raises(InvalidArgumentError, match="nothing was compared"):
        worst([])


def test_an_error_is_relative_to_the_largest_expected_value():
    expected = torch.tensor([1.0, -4.0], dtype=torch.float64)
    assert relative_error(expected + 1e-3, expected) == pytest.approx(2.5e-4)
    assert relative_error(expected + 1e-3, expected, scale=10 * expected) == pytest.approx(2.5e-5)
    assert relative_error(expected.float(), expected) == 0
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0
    assert relative_error(torch.full((3,), 1e-30), torch.zeros(3)) == math.inf
    assert relative_error(torch.zeros(0, 3), torch.zeros(0, 3)) == 0


@pytest.mark.parametrize("bad", [NAN, math.inf])
@pytest.mark.parametrize("places", [(0,), (1,), (0, 1), (2,)])
def test_what_is_not_finite_is_infinitely_far_off(places, bad):
    tensors = [torch.ones(4), torch.ones(4), torch.ones(4)]
    for place in places:
        tensors[place][1] = bad
    assert relative_error(tensors[0], tensors[1], scale=tensors[2]) == math.inf

    message = r"expected a tensor of shape \(2, 3\), got \(3,\)"
    with pytest.raises(InvalidArgumentError, match=message):
        relative_error(torch.ones(3), torch.ones(2, 3))

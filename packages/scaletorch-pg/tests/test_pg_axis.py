"""The strategies' rule for `group=None`, and how ranks are named in messages."""

from __future__ import annotations

import pytest
import torch.distributed as torch_dist

from scaletorch.dist import NotInGroupError, StateError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pg_manager import (
    axis_group,
    describe_rank,
    destroy_process_group_manager,
    groups,
    setup_process_group_manager,
)


def test_one_process_needs_no_manager():
    assert [axis_group(axis) for axis in groups.AXES] == [None] * 10
    assert describe_rank() == "rank 0"


def test_one_process_with_a_manager():
    setup_process_group_manager()
    assert axis_group("tp") is None
    assert describe_rank() == "rank 0 (dp0 pp0 cp0 tp0)"
    destroy_process_group_manager()


def one_rank():
    return axis_group("dp") is None


def test_a_world_of_one_rank_needs_no_manager():
    assert run_ranks(one_rank, 1) == [True]


def no_manager():
    with pytest.raises(StateError) as caught:
        axis_group("cp")
    return str(caught.value)


def test_many_ranks_without_a_manager_never_mean_world():
    for rank, message in enumerate(run_ranks(no_manager, 2)):
        assert message == (
            f"rank {rank}: no process group for the cp axis: this program runs 2 ranks and has "
            "no process group manager; pass group=..., or call setup_process_group_manager first"
        )


def with_a_manager(sizes):
    manager = setup_process_group_manager(tp_size=2, pp_size=2, **sizes)
    for axis in groups.AXES:
        assert axis_group(axis) is getattr(manager, f"{axis}_group")
    assert axis_group("dp_cp") is manager.cp_dp_group
    name = describe_rank()
    assert axis_group("tp", torch_dist.group.WORLD) is torch_dist.group.WORLD
    destroy_process_group_manager()
    with pytest.raises(StateError, match="no process group manager"):
        axis_group("tp")
    return name


@pytest.mark.parametrize(
    ("sizes", "second"),
    [({}, "dp0 pp0 cp0 tp1"), ({"ep_size": 2}, "dp0 pp0 cp0 tp1 edp0 ep1 etp0")],
)
def test_the_current_manager_answers(sizes, second):
    names = run_ranks(with_a_manager, 4, sizes)
    assert names[1] == f"rank 1 ({second})"
    assert names[3] == f"rank 3 ({second.replace('pp0', 'pp1')})"


def explicit_group():
    pair = torch_dist.new_group([0, 1])
    if torch_dist.get_rank() < 2:
        return axis_group("tp", pair) is pair
    with pytest.raises(NotInGroupError, match="rank 2 is not a member"):
        axis_group("tp", pair)
    return None


def test_an_explicit_group_is_used_as_given_and_outsiders_are_refused():
    assert run_ranks(explicit_group, 3) == [True, True, None]

"""Who and where we are, in one process and in groups; calls of one rank, which send nothing."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as c10d
from torch.distributed.tensor.debug import CommDebugMode

import scaletorch.dist as dist
from scaletorch.dist import InvalidArgumentError, NotInGroupError
from scaletorch.dist.building import all_gather_flat, reduce_scatter_flat
from scaletorch.dist.testing import distributed_test


@dist.master_only
def answer(value):
    """Return a value."""
    return value


def test_one_process_is_a_world_of_its_own():
    assert not dist.is_distributed()
    assert dist.get_world_size() == 1
    assert dist.get_rank() == 0
    assert dist.get_dist_info() == (0, 1)
    assert dist.get_backend() is None
    assert dist.get_local_rank() == 0
    assert dist.get_local_size() == 1
    assert dist.is_main_process()
    assert dist.get_default_group() is None
    assert dist.group_ranks() == (0,)
    assert dist.get_timeout() == timedelta(minutes=30)
    assert dist.infer_launcher() == "none"
    dist.require_member(None)
    dist.barrier()
    assert answer(5) == 5
    assert (answer.__name__, answer.__doc__) == ("answer", "Return a value.")
    for call in (dist.get_rank, dist.barrier, dist.get_comm_device, dist.sync_random_seed):
        with pytest.raises(InvalidArgumentError, match=r"must be a ProcessGroup, .* got list"):
            call([0, 1])


@distributed_test(world_size=4)
def test_the_default_group():
    rank = c10d.get_rank()
    assert dist.is_distributed()
    assert dist.get_dist_info() == (rank, 4)
    assert dist.get_backend() == "gloo"
    assert dist.get_default_group() is c10d.group.WORLD
    assert dist.group_ranks() == (0, 1, 2, 3)
    assert dist.is_main_process() == (rank == 0)
    assert answer(5) == (5 if rank == 0 else None)
    assert (dist.get_local_rank(), dist.get_local_size()) == (rank, 4)
    dist.barrier()


@distributed_test(world_size=4)
def test_groups_of_some_ranks():
    rank = c10d.get_rank()
    groups = [c10d.new_group([0, 2]), c10d.new_group([1, 3], timeout=timedelta(seconds=9))]
    own, other = groups[rank % 2], groups[1 - rank % 2]
    assert dist.get_dist_info(own) == (rank // 2, 2)
    assert dist.group_ranks(own) == ((0, 2), (1, 3))[rank % 2]
    assert dist.is_main_process(own) == (rank < 2)
    assert (dist.get_local_rank(own), dist.get_local_size(own)) == (rank // 2, 2)
    dist.barrier(own)
    dist.require_member(own)
    for call in (
        dist.get_rank, dist.get_world_size, dist.get_dist_info, dist.get_backend, dist.get_timeout,
        dist.get_local_rank, dist.get_local_size, dist.group_ranks, dist.is_main_process,
        dist.barrier, dist.get_comm_device, dist.require_member,
    ):  # fmt: skip
        with pytest.raises(NotInGroupError, match=f"rank {rank} is not a member"):
            call(other)
        with pytest.raises(InvalidArgumentError, match=r"must be a ProcessGroup, .* got str"):
            call("tp")
    # new_group does not inherit the default group's timeout, so that get_timeout is to be passed.
    assert dist.get_timeout(own) == (timedelta(minutes=30), timedelta(seconds=9))[rank % 2]
    assert dist.get_timeout() == timedelta(seconds=300)
    new = c10d.new_group([0, 1, 2, 3], timeout=dist.get_timeout())
    assert dist.get_timeout(new) == timedelta(seconds=300)


@distributed_test(world_size=3)
def test_an_outsider_is_told_the_ranks_of_the_last_group_made_without_it():
    pair = c10d.new_group([0, 2])
    if dist.get_rank() == 1:
        with pytest.raises(NotInGroupError, match=r"the last one made without it has ranks 0, 2\)"):
            dist.barrier(pair)


def in_place(call):
    def run(x, group):
        call(x := x.clone(), group)
        return x

    return run


def filled(call):
    def run(x, group):
        call(target := torch.zeros_like(x), x, group)
        return target

    return run


CALLS = {
    "all_reduce": in_place(lambda x, group: dist.all_reduce(x, "mean", group)),
    "reduce": in_place(lambda x, group: dist.reduce(x, 0, group=group)),
    "broadcast": in_place(lambda x, group: dist.broadcast(x, 0, group)),
    "all_reduce_dict": in_place(lambda x, group: dist.all_reduce_dict({"x": x}, group=group)),
    "all_reduce_params": in_place(lambda x, group: dist.all_reduce_params(iter([x]), group=group)),
    "all_gather_flat": in_place(lambda x, group: all_gather_flat(x.view(-1), [6], group)),
    "all_gather": lambda x, group: dist.all_gather(x, group)[0],
    "gather": lambda x, group: dist.gather(x, 0, group)[0],
    "all_to_all": dist.all_to_all,
    "fill a list": filled(lambda target, x, group: dist.all_gather([target], x, group)),
    "scatter": filled(lambda target, x, group: dist.scatter(target, [x], 0, group)),
    "reduce_scatter": filled(lambda to, x, group: dist.reduce_scatter(to, [x], "mean", group)),
    "exchange lists": filled(lambda target, x, group: dist.all_to_all([x], [target], group)),
    "reduce_scatter_flat": lambda x, group: (
        reduce_scatter_flat(x.view(-1).clone(), [6], "mean", group).wait().view(2, 3)
    ),
}


def return_what_many_would(group=None):
    x = torch.arange(6.0).view(2, 3)
    for name, call in CALLS.items():
        with CommDebugMode() as sent:
            found = call(x, group)
        assert torch.equal(found, x), name
        assert found.data_ptr() != x.data_ptr(), name
        assert sent.get_total_counts() == 0, name


def test_one_process_returns_what_many_would():
    return_what_many_would()


@distributed_test(world_size=1)
def test_a_group_of_one_rank_sends_nothing():
    return_what_many_would(c10d.group.WORLD)
    with CommDebugMode() as sent:
        c10d.all_reduce(torch.ones(1))
    assert sent.get_total_counts() == 1

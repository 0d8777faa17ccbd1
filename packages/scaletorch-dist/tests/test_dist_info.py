"""Who and where we are: in one process, in the default group and in groups of some ranks."""

from datetime import timedelta

import pytest
import torch.distributed as c10d

import scaletorch.dist as dist
from scaletorch.dist import InvalidArgumentError, NotInGroupError
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

"""Which groups are made: how many, with what timeout, under which names, in which worlds."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from scaletorch.dist import MismatchError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pg_manager import (
    Grid,
    ProcessGroupManager,
    destroy_process_group_manager,
    groups,
    setup_process_group_manager,
)
from scaletorch.parallel.pg_manager.building import groups_within

DENSE = [axis for axis in groups.AXES if axis not in ("ep", "edp", "etp", "world")]
SIZES = ("tp", "cp", "pp", "dp", "ep", "etp")


class CountedGroups:
    """Records the ranks of every new_group call, in a block."""

    def __init__(self):
        self.calls = []
        self.real = torch_dist.new_group

    def __enter__(self):
        torch_dist.new_group = self
        return self.calls

    def __exit__(self, *error):
        torch_dist.new_group = self.real

    def __call__(self, ranks, *args, **kwargs):
        self.calls.append(tuple(ranks))
        return self.real(ranks, *args, **kwargs)


def calls_of_ranks(sizes, ranks):
    """new_group calls that each rank of a fake world makes; no other rank exists."""
    grid = Grid(**sizes)
    made = {}
    for rank in ranks:
        torch_dist.init_process_group(
            "fake", store=FakeStore(), rank=rank, world_size=grid.world_size
        )
        with CountedGroups() as calls:
            manager = ProcessGroupManager(*(getattr(grid, size) for size in SIZES))
        made[rank] = list(calls)
        assert manager.global_rank == rank
        for axis in groups.AXES:
            members = torch_dist.get_process_group_ranks(manager.group(axis))
            assert members == getattr(manager, f"{axis}_group_ids")
        assert manager.cp_dp_group_ids == list(grid.group("cp_dp", rank))
        manager.destroy()
        torch_dist.destroy_process_group()
    return made


def all_ranks_of_64(experts, made):
    sizes = {"tp": 4, "cp": 2, "pp": 4, "dp": 2, **experts}
    grid = Grid(**sizes)
    for rank, calls in calls_of_ranks(sizes, range(64)).items():
        assert calls == [grid.group(axis, rank) for axis in (*DENSE, *made)]


@pytest.mark.parametrize(
    ("experts", "made"),
    [
        ({}, ["ep"]),
        ({"etp": 1}, ["ep", "edp"]),  # etp is ep
        ({"ep": 2}, ["ep", "edp", "etp"]),
        ({"ep": 8}, ["ep", "etp"]),  # edp is dp
    ],
)
def test_all_ranks_of_a_world_of_64_make_their_groups_in_one_order(experts, made):
    run_ranks(all_ranks_of_64, 1, experts, made, init=False)


def calls_and_timeouts(sizes, folder):
    rank, world_size = torch_dist.get_rank(), torch_dist.get_world_size()
    torch_dist.destroy_process_group()
    timeout = timedelta(seconds=77)
    torch_dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timeout
    )
    with CountedGroups() as calls:
        manager = setup_process_group_manager(**sizes)
    assert len(calls) == len(set(calls))
    device = torch.device("cpu")
    timeouts = {manager.group(axis)._get_backend(device).options._timeout for axis in groups.AXES}
    shared = len({id(manager.group(axis)) for axis in groups.AXES})
    destroy_process_group_manager()
    return calls, timeouts, shared


def test_real_ranks_make_only_their_own_groups(tmp_path):
    results = run_ranks(calls_and_timeouts, 4, {"tp_size": 2, "dp_size": 2}, str(tmp_path))
    assert [calls for calls, _, _ in results] == [
        [(0, 1), (0,), (0, 2)],
        [(0, 1), (1,), (1, 3)],
        [(2, 3), (2,), (0, 2)],
        [(2, 3), (3,), (1, 3)],
    ]
    for calls, timeouts, shared in results:
        assert timeouts == {timedelta(seconds=77)}
        assert shared == len(calls) + 1


def set_up_after_groups_of_some_ranks():
    rank = torch_dist.get_rank()
    pair = torch_dist.new_group([0, 1])
    if rank == 0:
        torch_dist.new_group([0], use_local_synchronization=True)
    manager = setup_process_group_manager(tp_size=2, dp_size=2)
    total = torch.tensor([float(rank)])
    torch_dist.all_reduce(total, group=manager.dp_group)
    destroy_process_group_manager()
    if rank < 2:
        torch_dist.barrier(pair)
    return total.item()


def test_groups_that_some_ranks_made_before_do_not_matter():
    assert run_ranks(set_up_after_groups_of_some_ranks, 4, timeout=30) == [2, 4, 2, 4]


def set_up_many_times(sizes):
    """A late rank must not meet the addresses that the last set-up left in the store."""
    totals = []
    for _ in range(4):
        manager = setup_process_group_manager(**sizes)
        assert all(  # what stood in torch's list meanwhile is gone
            isinstance(group, torch_dist.ProcessGroup)
            for group in torch_dist.distributed_c10d._world.pg_names
        )
        for group in (manager.tp_group, manager.dp_group):
            total = torch.ones(1)
            torch_dist.all_reduce(total, group=group)
            totals.append(total.item())
        destroy_process_group_manager()
        torch_dist.barrier()
        time.sleep(0.1 * torch_dist.get_rank())
    return totals


def test_set_up_again_and_again_never_reuses_a_name():
    sizes = {"tp_size": 2, "dp_size": 2}
    assert run_ranks(set_up_many_times, 4, sizes, timeout=30) == [[2, 2] * 4] * 4


def failing_set_up(bad_ranks):
    real, rank = torch_dist.new_group, torch_dist.get_rank()
    count = len(torch_dist.distributed_c10d._world.pg_names)

    def fail_at_cp(ranks, **options):
        if rank in bad_ranks and options["group_desc"] == "scaletorch_cp":
            raise OSError("no more sockets")
        return real(ranks, **options)

    torch_dist.new_group = fail_at_cp
    try:
        with pytest.raises((OSError, MismatchError)) as caught:
            setup_process_group_manager(tp_size=2, pp_size=2)
    finally:
        torch_dist.new_group = real
    assert len(torch_dist.distributed_c10d._world.pg_names) == count
    manager = setup_process_group_manager(tp_size=2, pp_size=2)
    destroy_process_group_manager()
    return str(caught.value), manager.pp_group_ids


@pytest.mark.parametrize("bad_ranks", [[0, 1, 2, 3], [0, 2]])
def test_a_set_up_that_fails_is_told_to_all_and_leaves_nothing_behind(bad_ranks):
    for rank, (message, members) in enumerate(run_ranks(failing_set_up, 4, bad_ranks)):
        assert members == [rank % 2, rank % 2 + 2]
        assert message == (
            "no more sockets"
            if rank in bad_ranks
            else "rank 0 cannot take part in the process groups: OSError: no more sockets"
        )


def like_mpi(sizes, axis):
    """MPI cannot make a group among its members alone: all ranks then make all groups."""
    groups.get_backend = lambda: "mpi"
    with CountedGroups() as calls:
        manager = setup_process_group_manager(**sizes)
    total = torch.tensor([float(torch_dist.get_rank())])
    with CountedGroups() as late:
        torch_dist.all_reduce(total, group=manager.group(axis))
    destroy_process_group_manager()
    groups.get_backend = torch_dist.get_backend
    return calls, late, total.item()


ALONE = [(rank,) for rank in range(4)]


@pytest.mark.parametrize(
    ("sizes", "axis", "made"),
    [
        ({"tp_size": 2, "dp_size": 2}, "tp", [(0, 1), (2, 3), *ALONE, (0, 2), (1, 3)]),
        ({"dp_size": 4, "ep_size": 2}, "ep", [*ALONE, (0, 1), (2, 3), (0, 2), (1, 3)]),
    ],
)
def test_mpi_makes_groups_together(sizes, axis, made):
    for rank, (calls, late, total) in enumerate(run_ranks(like_mpi, 4, sizes, axis)):
        assert (calls, late) == (made, [])
        assert total == (1 if rank < 2 else 5)


def pipeline_of_all_ranks(streams):
    has_streams, groups.has_streams = groups.has_streams, lambda *_: streams
    manager = setup_process_group_manager(pp_size=3)
    world, pipeline = torch_dist.group.WORLD, manager.pp_group
    assert torch_dist.get_process_group_ranks(pipeline) == [0, 1, 2]
    assert manager.group("pp_dp") is manager.group("world") is world
    rank, ends = torch_dist.get_rank(), (0, 2)
    wanted = [ends, (0, 1, 2), (1, 2)]
    made = groups_within(pipeline, wanted, 5000)
    assert list(made) == [ranks for ranks in wanted if rank in ranks]
    assert made[0, 1, 2] is pipeline
    if rank in ends:
        total = torch.ones(1)
        torch_dist.all_reduce(total, group=made[ends])
        assert total.item() == 2
    assert groups_within(pipeline, wanted, 6000) == made
    own = pipeline is not world
    del made, pipeline
    destroy_process_group_manager()
    assert (len(torch_dist.distributed_c10d._world.pg_names) == 1) == own
    groups.has_streams = has_streams
    return own


@pytest.mark.parametrize("streams", [False, True])
def test_a_pipeline_of_all_ranks_has_a_group_beside_world_on_devices_with_streams(streams):
    assert run_ranks(pipeline_of_all_ranks, 3, streams) == [streams] * 3

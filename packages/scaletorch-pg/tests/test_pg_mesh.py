"""device_mesh is one that DTensor and fully_shard accept."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from scaletorch.dist import StateError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pg_manager import (
    ProcessGroupManager,
    destroy_process_group_manager,
    setup_process_group_manager,
)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16, dtype=torch.float64)
        self.down = nn.Linear(16, 8, dtype=torch.float64)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def make_model():
    torch.manual_seed(7)
    return Mlp()


def make_batch():
    return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def one_step(model, batch, scale):
    loss = model(batch).square().sum() * scale
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model


def whole(state):
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in state.items()
    }


AXES = {"device_mesh": ("dp", "pp", "cp", "tp"), "expert_mesh": ("edp", "pp", "ep", "etp")}


def meshes(sizes):
    """Return the shape of both meshes, and this rank's place in them."""
    manager = setup_process_group_manager(**sizes)
    found, rank = [], manager.global_rank
    before = len(torch_dist.distributed_c10d._world.pg_names)
    for name, axes in AXES.items():
        mesh = getattr(manager, name)
        assert mesh is getattr(manager, name)
        assert mesh.mesh_dim_names == axes
        assert sorted(mesh.mesh.flatten().tolist()) == list(range(manager.world_size))
        for axis in axes:
            assert mesh[axis].get_group() is manager.group(axis)
            assert mesh[axis].mesh.tolist() == getattr(manager, f"{axis}_group_ids")
        found.append((tuple(mesh.shape), tuple(mesh.get_coordinate())))
    assert len(torch_dist.distributed_c10d._world.pg_names) == before
    place = manager.grid.expert_coordinates(rank)
    own = (place.edp, manager.pp_rank, place.ep, place.etp)
    places = [tuple(manager.grid.coordinates(rank)), own]
    destroy_process_group_manager()
    return [shape for shape, _ in found], [each for _, each in found] == places


@pytest.mark.parametrize(
    ("sizes", "shapes"),
    [
        ({"cp_size": 2, "pp_size": 2}, [(1, 2, 2, 1), (2, 2, 1, 1)]),
        ({"tp_size": 2, "pp_size": 2, "dp_size": 2, "ep_size": 2}, [(2, 2, 1, 2), (2, 2, 2, 1)]),
        (
            {"tp_size": 2, "cp_size": 2, "dp_size": 2, "ep_size": 2, "etp_size": 2},
            [(2, 1, 2, 2), (2, 1, 2, 2)],
        ),
    ],
)
def test_meshes_have_the_grid_s_shapes_and_the_same_groups(sizes, shapes):
    ranks = math.prod(size for axis, size in sizes.items() if axis[0] != "e")
    assert run_ranks(meshes, ranks, sizes) == [(shapes, True)] * ranks


def experts_sharded_over_ep_and_edp():
    """Stacked experts over ep, their copies sharded by FSDP2 over edp: a checkpoint's whole."""
    manager = setup_process_group_manager(tp_size=2, dp_size=2, ep_size=2)
    mesh = manager.expert_mesh
    full = torch.arange(24.0, dtype=torch.float64).reshape(4, 6)
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(full, mesh["ep"], [Shard(0)]))
    mine = torch.equal(module.weight.to_local(), full.chunk(2)[manager.ep_rank])
    fully_shard(module, mesh=mesh["edp"])
    shape = tuple(module.weight.to_local().shape)
    same = torch.equal(module.weight.full_tensor(), full)
    destroy_process_group_manager()
    return mine, shape, same


def test_fsdp_shards_the_copies_of_experts_that_dtensor_shares_out():
    assert run_ranks(experts_sharded_over_ep_and_edp, 4) == [(True, (1, 6), True)] * 4


def parallel_step():
    manager = setup_process_group_manager(tp_size=2, dp_size=2)
    mesh = manager.device_mesh
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(make_model(), mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    part = make_batch().chunk(2)[manager.dp_rank]
    one_step(model, part, 2.0)  # fully_shard averages over dp
    state = get_model_state_dict(model)
    placements = sorted({str(value.device_mesh.mesh_dim_names) for value in state.values()})
    full = whole(state)
    destroy_process_group_manager()
    return full, placements


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch's, of its own tensor parallelism
def test_fully_shard_with_tensor_parallel_steps_as_one_process():
    expected = one_step(make_model(), make_batch(), 1.0).state_dict()
    for full, meshes in run_ranks(parallel_step, 4):
        assert meshes == ["('dp', 'tp')"]
        for name, value in expected.items():
            torch.testing.assert_close(full[name], value, rtol=1e-12, atol=1e-12)


def test_mesh_without_process_groups_says_what_to_do():
    with pytest.raises(StateError, match=r"^device_mesh .* make the manager after init_dist"):
        ProcessGroupManager().device_mesh  # noqa: B018
    with pytest.raises(StateError, match=r"^expert_mesh .* make the manager after init_dist"):
        ProcessGroupManager().expert_mesh  # noqa: B018


@distributed_test(2)
def test_mesh_after_destroy_is_refused():
    manager = ProcessGroupManager(dp_size=2)
    manager.destroy()
    for name in ("device_mesh", "expert_mesh"):
        with pytest.raises(StateError, match="before the manager is destroyed"):
            getattr(manager, name)

"""device_mesh is one that DTensor and fully_shard accept."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
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


def mesh_of_a_rank(sizes):
    """Return the shape of the mesh."""
    manager = setup_process_group_manager(**sizes)
    before = len(torch_dist.distributed_c10d._world.pg_names)
    mesh = manager.device_mesh
    assert mesh is manager.device_mesh
    assert mesh.mesh_dim_names == ("dp", "pp", "cp", "tp")
    assert sorted(mesh.mesh.flatten().tolist()) == list(range(manager.world_size))
    for axis in mesh.mesh_dim_names:
        assert mesh[axis].get_group() is manager.group(axis)
        assert mesh[axis].mesh.tolist() == getattr(manager, f"{axis}_group_ids")
    assert len(torch_dist.distributed_c10d._world.pg_names) == before
    assert tuple(mesh.get_coordinate()) == manager.grid.coordinates(manager.global_rank)
    destroy_process_group_manager()
    return tuple(mesh.shape)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"cp_size": 2, "pp_size": 2}, (1, 2, 2, 1)),
        ({"tp_size": 2, "pp_size": 2, "dp_size": 2, "ep_size": 2}, (2, 2, 1, 2)),
    ],
)
def test_the_mesh_has_the_grid_s_shape_and_the_same_groups(sizes, shape):
    ranks = math.prod(shape)
    assert run_ranks(mesh_of_a_rank, ranks, sizes) == [shape] * ranks


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


@distributed_test(2)
def test_mesh_after_destroy_is_refused():
    manager = ProcessGroupManager(dp_size=2)
    manager.destroy()
    with pytest.raises(StateError, match="is gone: its manager or its default group was destroyed"):
        manager.device_mesh  # noqa: B018

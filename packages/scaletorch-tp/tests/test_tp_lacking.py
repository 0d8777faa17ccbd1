"""Tensor parallelism on a backend without sums: they are gathered, and added on each rank."""

from __future__ import annotations

import copy
from unittest import mock

import torch
import torch.distributed as c10d
from torch import nn

from scaletorch.dist.testing import distributed_test
from scaletorch.dist.wire.backend import Route
from scaletorch.dist.world.info import info_of
from scaletorch.parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear


@distributed_test(world_size=2)
def test_a_backend_without_sums():
    world = c10d.group.WORLD
    info_of(world).ways.clear()
    info_of(world).routes["cpu"] = Route("other", frozenset(("sum", "reduce_scatter")), True)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)).double()
    up = ColumnParallelLinear.from_plain(copy.deepcopy(plain[0]), group=world)
    down = RowParallelLinear.from_plain(copy.deepcopy(plain[2]), group=world)
    x = torch.randn(3, 6, dtype=torch.float64)
    mine, alone = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = plain(alone)
    expected.square().sum().backward()
    with mock.patch.object(c10d, "all_reduce", side_effect=AssertionError("it has no sums")):
        out = down(nn.functional.gelu(up(mine)))
        out.square().sum().backward()
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine.grad, alone.grad, rtol=1e-12, atol=1e-12)
    info_of(world).routes.clear()
    info_of(world).ways.clear()

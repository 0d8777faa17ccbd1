"""Against torch's DistributedDataParallel, which means over ranks."""

from __future__ import annotations

import copy

import torch
import torch.distributed as c10d
from torch import nn

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.data_parallel import DataParallelBucket, DataParallelNaive


def check_ddp():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    peer = nn.parallel.DistributedDataParallel(copy.deepcopy(net))
    data = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine = data[c10d.get_rank() :: 2]
    expected = []
    for _ in range(2):
        with peer.no_sync():
            peer(mine).square().mean().backward()
        peer(mine + 1).square().mean().backward()
        expected.append([p.grad.clone() for p in peer.parameters()])
    del peer  # alive when the group is destroyed, it can deadlock
    for kind in (DataParallelBucket, DataParallelNaive):
        model = kind(copy.deepcopy(net), group=c10d.group.WORLD, op="mean")
        for gradients in expected:
            with model.no_sync():
                model(mine).square().mean().backward()
            model(mine + 1).square().mean().backward()
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-14)


def test_mean_is_what_ddp_does_on_equal_shards():
    run_ranks(check_ddp, 2)

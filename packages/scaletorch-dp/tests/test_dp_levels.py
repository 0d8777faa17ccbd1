"""Buckets of a group that spans nodes go inside the nodes first, while backward goes on."""

from __future__ import annotations

import os
from unittest import mock

import torch
import torch.distributed as c10d
from torch import nn

import scaletorch.dist as dist
from scaletorch.dist.testing import run_ranks
from scaletorch.dist.transport import levels
from scaletorch.parallel.data_parallel import DataParallelBucket


def made():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(40, 40, dtype=torch.float64) for _ in range(4)])


def step():
    rank, made_stages = dist.get_rank(), []
    os.environ["GROUP_RANK"] = str(rank // 2)  # a node of its own to everyone
    assert dist.use_hierarchy()
    everyones = torch.randn(4, 3, 40, generator=torch.Generator().manual_seed(1)).double()
    plain = made()
    plain(everyones.flatten(0, 1)).square().mean().backward()
    model = DataParallelBucket(made(), group=c10d.group.WORLD, op="mean", bucket_size=1700)
    task = levels.Task

    def counted(way, stages):
        made_stages.append(len(stages))
        return task(way, stages)

    with mock.patch.object(levels, "Task", counted):
        for _ in range(2):
            model.zero_grad()
            model(everyones[rank]).square().mean().backward()
    grads = {name: p.grad for name, p in model.module.named_parameters()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-12, atol=1e-12)
    return made_stages


def test_buckets_go_through_the_nodes():
    for stages in run_ranks(step, 4):
        assert len(stages) >= 8
        assert set(stages) == {3}

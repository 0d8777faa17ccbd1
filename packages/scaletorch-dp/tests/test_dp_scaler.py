"""Ranks skip steps and change the loss scale together, and scaling changes nothing else."""

import math

import pytest
import torch
from torch import distributed, nn

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.data_parallel import DataParallelBucket, GradScaler


def build():
    torch.manual_seed(0)
    return DataParallelBucket(nn.Linear(4, 4), group=distributed.group.WORLD)


def backward(model, step, scaler=None):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 4, generator=generator).chunk(distributed.get_world_size())
    loss = model(x[distributed.get_rank()]).square().sum()
    (loss if scaler is None else scaler.scale(loss)).backward()


def new_scaler(**options):
    return GradScaler("cpu", 1024.0, growth_interval=2, group=distributed.group.WORLD, **options)


def overflow(fused):
    """Have an infinite gradient on one rank after backward, then good steps."""
    model, scaler = build(), new_scaler()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    scales, stepped = [], []
    for step in range(5):
        backward(model, step, scaler)
        if step == 1 and distributed.get_rank() == 1:
            model.module.weight.grad[0, 0] = math.inf
        before = model.module.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        stepped.append(not torch.equal(before, model.module.weight))
        scales.append(scaler.get_scale())
    return scales, stepped, model.module.weight.detach()


def both_overflows():
    return [overflow(fused) for fused in (False, True)]


def test_one_rank_s_overflow_is_everyone_s():
    for results in zip(*run_ranks(both_overflows, 2), strict=True):
        for scales, stepped, weight in results:
            assert scales == [1024, 512, 512, 1024, 1024]
            assert stepped == [True, False, True, True, True]
            assert torch.equal(weight, results[0][2])


def test_one_process_state_and_switch():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cpu", 8.0, growth_interval=3)
    for _ in range(2):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    other = GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    for each in (scaler, other):
        each.scale(weight.sum()).backward()
        each.step(optimizer)
        each.update()
        optimizer.zero_grad()
        assert each.get_scale() == 16
    off = GradScaler(enabled=False)
    assert off.scale(weight) is weight
    off.step(optimizer)
    off.update()
    assert off.state_dict() == {}
    weight.grad = None
    scaler.step(optimizer)  # no gradient, nothing infinite
    scaler.update()
    half = nn.Parameter(torch.ones(2, dtype=torch.float16))
    half.grad = torch.ones_like(half)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.step(torch.optim.SGD([half], lr=1.0))

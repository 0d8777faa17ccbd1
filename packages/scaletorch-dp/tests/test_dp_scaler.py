"""Ranks skip steps and change the loss scale together, and scaling changes nothing else."""

import math

import pytest
import torch
from torch import distributed, nn

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.data_parallel import (
    DataParallelBucket,
    GradScaler,
    Shard,
    parameter_shards,
)


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


def shards_of(model):
    """Divide the parameters' rows over the ranks: float32 masters, none on the last rank."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    found = []
    for shard in parameter_shards(model):
        share = shard.stop // (ranks - 1)
        start = rank * share
        if rank < ranks - 1:
            tensor = shard.parameter.detach().flatten()[start : start + share].float()
            found.append(Shard(shard.name, shard.parameter, start, start + share, tensor, False))
    return found


def sharded(poisoned):
    """Step float32 shards of float16 parameters; return their sums and the scale."""
    model, scaler = build(), new_scaler()
    shards = shards_of(model)
    tensors = [shard.tensor for shard in shards]
    spare = nn.Parameter(torch.zeros(1))  # an optimizer without any tensor is refused by torch
    optimizer = torch.optim.SGD(tensors or [spare], lr=0.5)
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor) * scaler.get_scale()
    if distributed.get_rank() == poisoned:
        tensors[0].grad[-1] = math.nan
    before = [tensor.clone() for tensor in tensors]
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    moved = [(b - t).unique().tolist() for b, t in zip(before, tensors, strict=True)]
    return moved, scaler.get_scale()


@pytest.mark.parametrize("poisoned", [0, None])
def test_shards_and_a_rank_without_any(poisoned):
    results = run_ranks(sharded, 3, poisoned)
    step = 0.5 if poisoned is None else 0.0
    for moved, scale in results[:2]:
        assert moved == [pytest.approx([step] * len(values)) for values in moved]
        assert len(moved) == 2
        assert scale == (1024 if poisoned is None else 512)
    assert results[2] == ([], results[0][1])


def train(scaled):
    model, scaler = build(), new_scaler() if scaled else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        backward(model, step, scaler)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return model.module.weight.detach()


def trained_both_ways():
    return torch.equal(train(True), train(False))


def test_scaling_by_powers_of_two_keeps_every_bit():
    assert run_ranks(trained_both_ways, 2) == [True, True]


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

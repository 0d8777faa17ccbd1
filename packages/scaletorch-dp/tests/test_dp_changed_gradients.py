"""Gradients changed before a step, loss scales, and parameters that come after wrapping."""

from __future__ import annotations

import copy
import math
from itertools import product

import pytest
import torch
import torch.distributed as c10d
from in_turn import for_each, in_turn
from torch import nn

from scaletorch.dist import all_gather_object
from scaletorch.dist.errors import StateError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.data_parallel import (
    DataParallelBucket,
    GradScaler,
    clip_grad_norm_,
    shard_optimizer,
    whole_gradients,
)

STAGES = (0, 1, 2)


def two_layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def rows(rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def wrapped(stage, plain):
    model = DataParallelBucket(copy.deepcopy(plain), group=c10d.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1)
    if stage:
        shard_optimizer(optimizer, model, stage=stage)
    return model, optimizer


def drop(model):
    model[1].weight.grad = None


def put(model):
    model[1].weight.grad = torch.full_like(model[1].weight, 5.0)


def check_scaler(stage):
    """An overflow in a gradient that is dropped counts nothing, and what is put is unscaled."""
    plain = two_layers()
    theirs = torch.optim.SGD(plain.parameters(), lr=1.0, weight_decay=0.1)
    model, ours = wrapped(stage, plain)
    scaler = GradScaler("cpu", 4.0, group=c10d.group.WORLD)
    plainly = torch.amp.GradScaler("cpu", 4.0)
    for change in (drop, put):
        scaler.scale(model(rows(c10d.get_rank())).square().sum()).backward()
        for rank in range(2):
            plainly.scale(plain(rows(rank)).square().sum()).backward()
        change(model.module)
        change(plain)
        for each, optimizer in ((scaler, ours), (plainly, theirs)):
            each.unscale_(optimizer)
            each.step(optimizer)
            each.update()
            optimizer.zero_grad()
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    scaler.scale(model(rows(c10d.get_rank())).square().sum()).backward()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.inf)
    before = [each.detach().clone() for each in model.parameters()]
    scaler.step(ours)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(map(torch.equal, before, model.parameters()))


def check_not_synchronised():
    """Gradients of this rank alone are refused."""
    model, ours = wrapped(1, two_layers())
    with model.no_sync():
        model(rows(0)).sum().backward()
    for call in (
        ours.step,
        lambda: clip_grad_norm_(model, 1.0, c10d.group.WORLD),
        lambda: whole_gradients(model),
    ):
        with pytest.raises(StateError, match=r"bias has not been synchronised; step only after .*"
                           r"or drop it by zero_grad\(\)"):  # fmt: skip
            call()


def leave(weight):
    """Do nothing."""


def put_five(weight):
    weight.grad = torch.full_like(weight, 5.0)


def zero(weight):
    weight.grad.zero_()


def check_before_it_is_synchronised(dtype, grad_type, change, expected):
    """Change the gradients of an unsynchronised backward, then run two more."""
    layer = nn.Linear(1, 1, bias=False, dtype=dtype)
    model = DataParallelBucket(layer, group=c10d.group.WORLD, grad_type=grad_type)
    data = torch.full((1, 1), c10d.get_rank() + 1.0, dtype=dtype)
    with model.no_sync():
        model(data).sum().backward()
        change(layer.weight)
        model(data).sum().backward()
    model(data).sum().backward()
    assert layer.weight.grad.item() == expected


def test_changed_gradients_count_and_those_of_one_rank_are_not_stepped_with():
    dtypes = ((torch.float64, None), (torch.bfloat16, torch.float32))
    changes = ((leave, 9), (put_five, 16), (zero, 6))
    run_ranks(
        in_turn,
        2,
        [
            *for_each(check_scaler, product(STAGES)),
            check_not_synchronised,
            *for_each(check_before_it_is_synchronised, ((*d, *c) for d in dtypes for c in changes)),
        ],
    )


def assign(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def add(model):
    model.register_parameter("extra", nn.Parameter(torch.ones(2)))


def replace(model):
    model[1] = nn.Linear(4, 4)


CASES = [
    (assign, r"0\.weight, 0\.bias, 1\.weight, …"),
    (add, "extra"),
    (replace, r"1\.weight, 1\.bias"),
]


def check_parameters_after(stage, change, names):
    model, ours = wrapped(stage, two_layers())
    change(model.module)
    told = rf"^rank \d.*: {names} came after the module was wrapped .* change the module first"
    with pytest.raises(StateError, match=told):
        model(rows(0))
    with torch.no_grad():
        model(rows(0))  # an evaluation has no gradients
    if stage:
        with pytest.raises(StateError, match=told):
            ours.step()


def check_frozen_newcomer():
    """A frozen parameter may come, and not be unfrozen."""
    model, ours = wrapped(0, two_layers())
    model.module[0].register_parameter("scale", nn.Parameter(torch.ones(2), requires_grad=False))
    model(rows(0)).sum().backward()
    ours.step()
    model.module[0].scale.requires_grad_(True)
    with pytest.raises(StateError, match=r"0\.scale came after the module was wrapped"):
        model(rows(0))


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_that_come_after_wrapping(ranks):
    cases = ((stage, *case) for stage in STAGES for case in CASES)
    run_ranks(in_turn, ranks, [*for_each(check_parameters_after, cases), check_frozen_newcomer])


def check_overflow(fused):
    """Have an infinite gradient on one rank after backward, then good steps."""
    model = DataParallelBucket(nn.Linear(4, 4), group=c10d.group.WORLD)
    scaler = GradScaler("cpu", 1024.0, growth_interval=2, group=c10d.group.WORLD)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    scales, stepped = [], []
    for step in range(5):
        scaler.scale(model(rows(2 * step + c10d.get_rank())).square().sum()).backward()
        if step == 1 and c10d.get_rank() == 1:
            model.module.weight.grad[0, 0] = math.inf
        before = model.module.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        stepped.append(not torch.equal(before, model.module.weight))
        scales.append(scaler.get_scale())
    assert scales == [1024, 512, 512, 1024, 1024]
    assert stepped == [True, False, True, True, True]
    assert len({str(w) for w in all_gather_object(model.module.weight.tolist())}) == 1


def test_one_rank_s_overflow_is_everyone_s():
    run_ranks(in_turn, 2, for_each(check_overflow, [(False,), (True,)]))


def test_a_step_without_gradients():
    scaler = GradScaler("cpu", 8.0)
    scaler.step(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0))  # nothing is infinite
    scaler.update()
    assert scaler.get_scale() == 8

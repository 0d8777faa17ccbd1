"""Changes of gradients between backward and step count, with shards and without."""

from __future__ import annotations

import copy
import math
from itertools import product

import pytest
import torch
import torch.distributed as c10d
from in_turn import for_each, in_turn_of
from torch import nn

from scaletorch.dist.errors import StateError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.data_parallel import (
    DataParallelBucket,
    GradScaler,
    clip_grad_norm_,
    shard_optimizer,
    whole_gradients,
)

in_turn = in_turn_of(__name__)

STAGES = (0, 1, 2)


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()


def rows(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def wrapped(stage, plain):
    model = DataParallelBucket(copy.deepcopy(plain), group=c10d.group.WORLD)
    ours = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1)
    if stage:
        shard_optimizer(ours, model, stage=stage)
    return model, ours, torch.optim.SGD(plain.parameters(), lr=1.0, weight_decay=0.1)


def backward(model, plain):
    model(rows(c10d.get_rank())).square().sum().backward()
    for rank in range(c10d.get_world_size()):
        plain(rows(rank)).square().sum().backward()


def assert_same(model, plain):
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, msg=name)


def drop(model):
    model[1].weight.grad = None


def put(model):
    model[1].weight.grad = torch.full_like(model[1].weight, 5.0)


def freeze(model):
    model[1].weight.requires_grad_(False)


CHANGES = (drop, put, freeze)


def check_closure(stage, change):
    plain = two_layers()
    model, ours, theirs = wrapped(stage, plain)

    def closure():
        ours.zero_grad()
        theirs.zero_grad()
        backward(model, plain)
        change(model.module)
        change(plain)
        return 0.0

    ours.step(closure)
    theirs.step()
    ours.step(closure=closure)
    theirs.step()
    assert_same(model, plain)


def test_a_closure_changes_them():
    run_ranks(in_turn, 2, for_each(check_closure, product(STAGES, CHANGES)))


def check_scaler(stage):
    """An overflow in a gradient that is dropped counts nothing, and what is put is unscaled."""
    plain = two_layers().float()
    model, ours, theirs = wrapped(stage, plain)
    scaler = GradScaler("cpu", 4.0, group=c10d.group.WORLD)
    plainly = torch.amp.GradScaler("cpu", 4.0)
    for change in (drop, put):
        x = rows(c10d.get_rank()).float()
        scaler.scale(model(x).square().sum()).backward()
        for rank in range(2):
            plainly.scale(plain(rows(rank).float()).square().sum()).backward()
        change(model.module)
        change(plain)
        for each, optimizer in ((scaler, ours), (plainly, theirs)):
            each.unscale_(optimizer)
            each.step(optimizer)
            each.update()
        for name, each in plain.named_parameters():
            found = dict(model.named_parameters())[name]
            torch.testing.assert_close(found, each, rtol=1e-5, atol=1e-5)
        ours.zero_grad()
        theirs.zero_grad()
    scaler.scale(model(rows(c10d.get_rank()).float()).square().sum()).backward()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.inf)
    before = [each.detach().clone() for each in model.parameters()]
    scaler.step(ours)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(map(torch.equal, before, model.parameters()))


def test_scalers_follow():
    run_ranks(in_turn, 2, for_each(check_scaler, product(STAGES)))


def check_not_synchronised():
    """Gradients of this rank alone are refused."""
    model, ours, _ = wrapped(1, two_layers())
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


def assign(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def add(model):
    model.register_parameter("extra", nn.Parameter(torch.ones(2)))


def replace(model):
    model[1] = nn.Linear(4, 4).double()


CASES = [
    (assign, r"0\.weight, 0\.bias, 1\.weight, …"),
    (add, "extra"),
    (replace, r"1\.weight, 1\.bias"),
]


def check_parameters_after(stage, change, names):
    model, ours, _ = wrapped(stage, two_layers())
    change(model.module)
    told = rf"^rank \d.*: {names} came after the module was wrapped .* change the module first"
    with pytest.raises(StateError, match=told):
        model(rows(0))
    with torch.no_grad():
        model(rows(0))  # an evaluation has no gradients
    if stage:
        with pytest.raises(StateError, match=told):
            ours.step()


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_that_come_after_wrapping(ranks):
    run_ranks(
        in_turn,
        ranks,
        for_each(check_parameters_after, ((s, *case) for s in STAGES for case in CASES)),
    )


def check_frozen_newcomer():
    """A frozen parameter has no gradient to be summed; it may come, and not be unfrozen."""
    model, ours, _ = wrapped(0, two_layers())
    model.module[0].register_parameter("scale", nn.Parameter(torch.ones(2), requires_grad=False))
    model(rows(0)).sum().backward()
    ours.step()
    model.module[0].scale.requires_grad_(True)
    with pytest.raises(StateError, match=r"0\.scale came after the module was wrapped"):
        model(rows(0))


def check_on_two():
    check_not_synchronised()
    check_frozen_newcomer()


def test_frozen_parameters_may_come_after_wrapping_and_no_gradients_of_one_rank_alone():
    run_ranks(check_on_two, 2)


def put_another(weight):
    weight.grad = torch.full_like(weight, 5.0)


def zero_it(weight):
    weight.grad.zero_()


def leave_it(weight):
    """Do nothing."""


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


def test_gradients_of_one_rank_alone_may_be_changed():
    dtypes = ((torch.float64, None), (torch.bfloat16, torch.float32))
    changes = ((leave_it, 9), (put_another, 16), (zero_it, 6))
    run_ranks(
        in_turn,
        2,
        for_each(check_before_it_is_synchronised, ((*d, *c) for d in dtypes for c in changes)),
    )

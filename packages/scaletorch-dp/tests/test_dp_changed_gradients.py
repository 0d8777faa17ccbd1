"""What a program does to gradients between backward and step counts, with shards as without."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as c10d
from torch import nn

from scaletorch.dist.errors import StateError
from scaletorch.dist.testing import preload, run_ranks
from scaletorch.parallel.data_parallel import (
    DataParallelBucket,
    GradScaler,
    clip_grad_norm_,
    shard_optimizer,
    whole_gradients,
)

STAGES = pytest.mark.parametrize("stage", [0, 1, 2])


@pytest.fixture(scope="module", autouse=True)
def _dynamo():
    preload("torch._dynamo")  # which the first optimizer of a process imports


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


CHANGES = pytest.mark.parametrize("change", [drop, put, freeze])


def check_clipping(stage, change):
    plain = two_layers()
    model, ours, theirs = wrapped(stage, plain)
    backward(model, plain)
    change(model.module)
    change(plain)
    norm = clip_grad_norm_(model, 0.5, c10d.group.WORLD)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    found = whole_gradients(model)
    for name, each in plain.named_parameters():
        assert (name in found) == (each.grad is not None)
        if each.grad is not None:
            torch.testing.assert_close(found[name], each.grad)
            (own,) = whole_gradients(model, [name]).items()
            assert own[0] == name
            torch.testing.assert_close(own[1], each.grad)
        else:
            assert whole_gradients(model, [name]) == {}
    ours.step()
    theirs.step()
    assert_same(model, plain)


@STAGES
@CHANGES
def test_norms_and_clipping_follow(stage, change):
    run_ranks(check_clipping, 2, stage, change)


def check_later_backward(stage, change):
    plain = two_layers()
    model, ours, theirs = wrapped(stage, plain)
    change(model.module)
    change(plain)
    for _ in range(2):
        backward(model, plain)
        change(model.module)
        change(plain)
    backward(model, plain)
    ours.step()
    theirs.step()
    assert_same(model, plain)


@STAGES
@CHANGES
def test_a_later_backward_adds_to_it(stage, change):
    run_ranks(check_later_backward, 2, stage, change)


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


@STAGES
@CHANGES
def test_a_closure_changes_them(stage, change):
    run_ranks(check_closure, 2, stage, change)


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


@STAGES
def test_scalers_follow(stage):
    run_ranks(check_scaler, 2, stage)


class Either(nn.Module):
    """Two weights of which a call uses one or both."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.b = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, used):
        return sum((getattr(self, name) * 2).sum() for name in used)


def check_zeroed(stage, set_to_none, through):
    """Ranks use different weights in a backward that is not synchronised, and discard it."""
    plain = Either()
    model, ours, _ = wrapped(stage, plain)
    model("ab").backward()
    with model.no_sync():
        model("ab" if c10d.get_rank() else "a").backward()
    {"model": model, "optimizer": ours}[through].zero_grad(set_to_none=set_to_none)
    model("ab").backward()
    for name, gradient in whole_gradients(model).items():
        assert gradient.tolist() == [4.0, 4.0], name


@STAGES
@pytest.mark.parametrize("through", ["model", "optimizer"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_after_ranks_used_different_parameters(stage, set_to_none, through):
    run_ranks(check_zeroed, 2, stage, set_to_none, through)


def check_discarded(stage, before, set_to_none):
    """A step after a backward that was discarded: nothing to do, or zeros, as in torch."""
    plain = two_layers()
    model, ours, theirs = wrapped(stage, plain)
    if before:
        backward(model, plain)
    with model.no_sync():
        backward(model, plain)
    model.zero_grad(set_to_none=set_to_none)
    theirs.zero_grad(set_to_none=set_to_none)
    ours.step()
    theirs.step()
    assert_same(model, plain)


@STAGES
@pytest.mark.parametrize(("before", "set_to_none"), [(False, True), (True, True), (True, False)])
def test_a_step_after_a_discarded_backward(stage, before, set_to_none):
    run_ranks(check_discarded, 2, stage, before, set_to_none)


def check_not_synchronised():
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


def test_gradients_of_this_rank_alone_are_refused():
    run_ranks(check_not_synchronised, 2)


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


def check_parameters_after(stage, change, names, wrapper):
    plain = two_layers()
    if wrapper is DataParallelBucket:
        model, ours, _ = wrapped(stage, plain)
    else:
        model, ours = wrapper(plain, group=c10d.group.WORLD), None
    change(model.module)
    told = rf"^rank \d.*: {names} came after the module was wrapped .* change the module first"
    with pytest.raises(StateError, match=told):
        model(rows(0))
    with torch.no_grad():
        model(rows(0))  # an evaluation has no gradients
    if stage:
        with pytest.raises(StateError, match=told):
            ours.step()


@STAGES
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("change", "names"), CASES)
def test_parameters_that_come_after_wrapping(stage, ranks, change, names):
    run_ranks(check_parameters_after, ranks, stage, change, names, DataParallelBucket)


def check_frozen_newcomer():
    """A frozen parameter has no gradient to be summed; it may come, and not be unfrozen."""
    model, ours, _ = wrapped(0, two_layers())
    model.module[0].register_parameter("scale", nn.Parameter(torch.ones(2), requires_grad=False))
    model(rows(0)).sum().backward()
    ours.step()
    model.module[0].scale.requires_grad_(True)
    with pytest.raises(StateError, match=r"0\.scale came after the module was wrapped"):
        model(rows(0))


def test_frozen_parameters_may_come_after_wrapping():
    run_ranks(check_frozen_newcomer, 2)


def put_another(weight):
    weight.grad = torch.full_like(weight, 5.0)


def zero_it(weight):
    weight.grad.zero_()


def leave_it(weight):
    """Do nothing."""


def check_before_it_is_synchronised(dtype, grad_type, change, expected):
    """What one backward without synchronisation left is changed, then two more follow."""
    layer = nn.Linear(1, 1, bias=False, dtype=dtype)
    model = DataParallelBucket(layer, group=c10d.group.WORLD, grad_type=grad_type)
    data = torch.full((1, 1), c10d.get_rank() + 1.0, dtype=dtype)
    with model.no_sync():
        model(data).sum().backward()
        change(layer.weight)
        model(data).sum().backward()
    model(data).sum().backward()
    assert layer.weight.grad.item() == expected


@pytest.mark.parametrize(
    ("dtype", "grad_type"), [(torch.float64, None), (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize(("change", "expected"), [(leave_it, 9), (put_another, 16), (zero_it, 6)])
def test_gradients_of_one_rank_alone_may_be_changed(dtype, grad_type, change, expected):
    run_ranks(check_before_it_is_synchronised, 2, dtype, grad_type, change, expected)

"""One input of several layers enters once; weights' gradients are computed while its travels."""

import copy
import itertools
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.tensor_parallel import (
    ColumnParallelLinear,
    apply_tensor_parallel,
)
from scaletorch.parallel.tensor_parallel.regions import region

PLAN = {"**.up": "column", "**.gate": "column", "**.down": "row"}


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.down(self.up(x) * torch.sigmoid(self.gate(x)))


class InPlace(Gated):
    """Its second layer takes another tensor than its first."""

    def forward(self, x):
        return self.down(self.up(x) * torch.sigmoid(self.gate(x.clone())))


class Blocks(nn.Module):
    """Two blocks behind a norm, as a layer has them."""

    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(6), Gated(), Gated()

    def forward(self, x):
        x = self.norm(x)
        return x + self.second(x + self.first(x))


def plain():
    torch.manual_seed(0)
    return Blocks().double()


def sharded(model, *, sequence=False, overlapped=True):
    model = copy.deepcopy(model)
    plan = PLAN | ({"": "sequence_layer"} if sequence else {})
    apply_tensor_parallel(model, plan, dist.group.WORLD, sequence_parallel=sequence)
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear):
            assert module.async_all_reduce
            module.async_all_reduce = overlapped
    return model


def batch(sequence=False):
    """Return [B, L, H], and the part of it that this rank is given."""
    x = torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, x.chunk(dist.get_world_size(), 1)[dist.get_rank()] if sequence else x


class Watched:
    """Watches products, and when a collective starts and is waited for."""

    def __init__(self, name):
        self.calls, self.own, self.name = [], getattr(region, name), name

    def __call__(self, *args, **options):
        self.calls.append("start")
        self.work = self.own(*args, **options)
        return self

    def wait(self):
        self.calls.append("wait")
        self.work.wait()

    def run(self, call):
        calls = self.calls

        class Products(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                    calls.append("mm")
                return function(*args, **(kwargs or {}))

        with patch.object(region, self.name, self), Products():
            call()
        return calls


def order(sequence):
    model, (_, x) = sharded(plain(), sequence=sequence).first, batch(sequence)
    out = model(x.clone().requires_grad_()).sum()
    return Watched("reduce_scatter" if sequence else "all_reduce").run(out.backward)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_region_sends_before_it_computes_the_gradients_of_its_weights(sequence):
    for calls in run_ranks(order, 2, sequence):
        # the row layer's two, the columns' for their input, then the columns' for their weights
        assert calls == ["mm", "mm", "mm", "mm", "start", "mm", "mm", "wait"]


@pytest.mark.parametrize(
    ("sequence", "autocast", "frozen"), [*itertools.product((False, True), repeat=3)]
)
@distributed_test(world_size=2)
def test_overlap_changes_no_bit(sequence, autocast, frozen):
    results = []
    for overlapped in (False, True):
        model = sharded(plain().float(), sequence=sequence, overlapped=overlapped)
        model.first.up.weight.requires_grad_(not frozen)
        x = batch()[0].float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(x)
        out.float().square().sum().backward()
        results.append([out, x.grad, *(p.grad for p in model.parameters())])
    for one, other in zip(*results, strict=True):
        assert (one is None and other is None) or one.dtype == other.dtype
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("sequence", [False, True])
@distributed_test(world_size=2)
def test_second_derivatives(sequence):
    """The gradient of a gradient's norm, where products and sums are differentiated again."""

    def penalty(model, x):
        x = x.detach().clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        return x.grad

    reference, model = plain().first, sharded(plain(), sequence=sequence).first
    x, own = batch(sequence)
    expected, got = penalty(reference, x), penalty(model, own)
    if sequence:
        expected = expected.chunk(2, 1)[dist.get_rank()]
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for name in ("up", "gate"):
        whole = reference.get_submodule(name).weight.grad.chunk(2)[dist.get_rank()]
        found = model.get_submodule(name).weight.grad
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)


class Borrowing(Gated):
    """Also calls a layer that another module holds."""

    def forward(self, x):
        return super().forward(x) + self.others[0](x)


@distributed_test(world_size=2)
def test_a_region_that_calls_a_layer_of_another_module():
    torch.manual_seed(0)
    plain = nn.ModuleDict({"first": Borrowing(), "head": nn.Linear(6, 6)}).double()
    vars(plain["first"])["others"] = [plain["head"]]
    plan = PLAN | {"head": "column_gather"}
    model = apply_tensor_parallel(copy.deepcopy(plain), plan, dist.group.WORLD)
    for name in ("up", "gate"):
        model["first"].get_submodule(name).async_all_reduce = False
    x, _ = batch()
    grads = []
    for each in (plain, model):
        leaf = x.clone().requires_grad_()
        each["first"](leaf).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


@distributed_test(world_size=2)
def test_gradients_of_some_inputs_only():
    model, (_, x) = sharded(plain()), batch()
    x = x.clone().requires_grad_()
    (alone,) = torch.autograd.grad(model(x).square().sum(), x)
    weight = model.first.up.weight
    (one,) = torch.autograd.grad(model(x).square().sum(), weight)
    model(x).square().sum().backward()
    torch.testing.assert_close(alone, x.grad, rtol=0, atol=0)
    torch.testing.assert_close(one, weight.grad, rtol=0, atol=0)


def sums_of_a_step(how):
    """Return how many tensors a step sums over the ranks; its gradients are one process's."""
    torch.manual_seed(0)
    one = (InPlace if how == "other input" else Gated)().double()
    x = batch()[0][0]
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    one(theirs).square().sum().backward()
    model = apply_tensor_parallel(copy.deepcopy(one), PLAN, dist.group.WORLD)
    if how == "deepcopy":
        model = copy.deepcopy(model)
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums:
        if "checkpoint" in how:
            out = checkpoint(model, mine, use_reentrant="non" not in how)
        else:
            out = model(mine)
        out.square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    gradient = one.up.weight.grad.tensor_split(2)[dist.get_rank()]
    torch.testing.assert_close(model.up.weight.grad, gradient, rtol=1e-12, atol=1e-12)
    return sums.call_count


SUMS = {
    "plain": 2,  # forward of the row layer, and one gradient for both columns
    "deepcopy": 2,
    "other input": 3,  # two inputs, two gradients
    "non-reentrant checkpoint": 2,  # recomputation stops before the row layer
    "reentrant checkpoint": 3,
}


def all_sums():
    model = apply_tensor_parallel(Gated(), PLAN, dist.group.WORLD)
    x = torch.randn(2, 6)
    with torch.no_grad():
        first = model(x)
    x.mul_(2)  # without gradients nothing that entered is kept
    assert not torch.equal(first, model(x).detach())
    return {how: sums_of_a_step(how) for how in SUMS}


def test_one_sum_for_one_input():
    assert run_ranks(all_sums, 2) == [SUMS] * 2

"""Linear layers that write their weights' gradients right into the buckets."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.distributed as c10d
from torch import nn

from scaletorch.dist.testing import preload, run_ranks
from scaletorch.parallel.data_parallel import DataParallelBucket
from scaletorch.parallel.data_parallel.buckets.slot import Slot


@pytest.fixture(scope="module", autouse=True)
def _dynamo():
    preload("torch._dynamo")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight  # used twice, once by a linear layer
        self.relu = nn.ReLU(inplace=True)

    def forward(self, ids):
        x = self.embed(ids)
        x = self.second(self.relu(self.first(x)))
        return self.head(self.second(self.first(x)))


def ids(rank):
    return torch.tensor([[0, 1, 2], [3, 4, rank]])


def pair(dtype=torch.float64):
    torch.manual_seed(0)
    plain = Net().to(dtype)
    return DataParallelBucket(copy.deepcopy(plain), group=c10d.group.WORLD), plain


def count(of):
    """Let every slot note its products."""
    calls = []
    original = Slot.add_product

    def noting(slot, *args):
        calls.append(slot.name)
        original(slot, *args)

    of.setattr(Slot, "add_product", noting)
    return calls


def check_gradients():
    with pytest.MonkeyPatch.context() as patch:
        calls = count(patch)
        model, plain = pair()
        for _ in range(2):
            with model.no_sync():
                model(ids(c10d.get_rank())).sum().backward()
            model(ids(c10d.get_rank())).square().sum().backward()
            for rank in range(2):
                plain(ids(rank)).sum().backward()
                plain(ids(rank)).square().sum().backward()
            for (name, found), expected in zip(
                model.named_parameters(), plain.parameters(), strict=True
            ):
                torch.testing.assert_close(
                    found.grad, expected.grad, rtol=1e-12, atol=1e-12, msg=name
                )
        assert sorted(set(calls)) == ["embed.weight", "first.weight", "second.weight"]


def test_products_add_up_to_the_gradient():
    run_ranks(check_gradients, 2)


def check_bits():
    """One backward's gradient has the bits that autograd would give it."""
    model, plain = pair(torch.float32)
    model.require_backward_grad_sync = False
    model(ids(0)).sum().backward()
    plain(ids(0)).sum().backward()
    assert torch.equal(model.first.bias.grad, plain.first.bias.grad)
    one = DataParallelBucket(nn.Linear(64, 48), group=c10d.group.WORLD)
    other = copy.deepcopy(one.module)
    x = torch.randn(3, 7, 64)
    with one.no_sync():
        one(x).sum().backward()
    other(x).sum().backward()
    assert torch.equal(one.weight.grad, other.weight.grad)


def test_a_product_has_autograds_bits():
    run_ranks(check_bits, 2)


def check_left_alone():
    """What wants to see the gradient, or takes it for itself, gets it."""
    model, plain = pair()
    found = torch.autograd.grad(model(ids(0)).sum(), list(model.parameters()))
    expected = torch.autograd.grad(plain(ids(0)).sum(), list(plain.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(p.grad is None for p in model.parameters())
    (first,) = torch.autograd.grad(model(ids(0)).sum(), [model.first.weight], create_graph=True)
    assert torch.equal(first.detach(), expected[1])
    assert torch.autograd.grad(first.square().sum(), [model.second.weight])[0].any()
    with model.no_sync():
        model(ids(0)).sum().backward(inputs=[model.second.weight])
    assert model.first.weight.grad is None
    # Used twice, its second product is added by the multiplication itself: other bits on some CPUs.
    torch.testing.assert_close(model.second.weight.grad, expected[3], rtol=1e-15, atol=1e-15)
    model.zero_grad()
    seen = []
    model.first.weight.register_hook(lambda grad: seen.append(grad.clone()))
    with model.no_sync():
        model(ids(0)).sum().backward()
    assert torch.equal(seen[0], expected[1])
    model.first.weight.requires_grad_(False)
    with model.no_sync():
        model(ids(0)).sum().backward()
    with torch.autocast("cpu", torch.bfloat16), model.no_sync():
        model.float()(ids(0)).sum().backward()


def test_gradients_that_somebody_wants_to_see():
    run_ranks(check_left_alone, 2)


def check_copies():
    """A copy's gradients are its own, and nothing stays behind when the wrapper goes."""
    model, plain = pair()
    file = io.BytesIO()
    torch.save(model.module, file)
    file.seek(0)
    expected = torch.autograd.grad(plain(ids(0)).sum(), list(plain.parameters()))
    for other in (copy.deepcopy(model.module), torch.load(file, weights_only=False)):
        other(ids(0)).sum().backward()
        for p, gradient in zip(other.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, gradient)
        assert all(p.grad is None for p in model.parameters())
    module = model.module
    assert "forward" in vars(module.first)
    gc.disable()
    try:
        gone = weakref.ref(model)
        del model
        assert gone() is None
        assert "forward" not in vars(module.first)
    finally:
        gc.enable()


def test_copies_and_the_end_of_the_wrapper():
    run_ranks(check_copies, 2)


def check_plain_torch():
    """What plain layers can do, wrapped ones can: complex, empty, nested, transformed, reused."""
    world = c10d.group.WORLD
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(3, 4, dtype=torch.complex128), nn.Linear(4, 2, dtype=torch.complex128)
    )
    model = DataParallelBucket(copy.deepcopy(plain), group=world)
    x = torch.randn(5, 3, dtype=torch.complex128)
    for net in (model, plain):
        (net(x).abs().square().sum() / (2 if net is model else 1)).backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    layer = nn.Linear(4, 3).double()
    one = DataParallelBucket(copy.deepcopy(layer), group=world)
    x = torch.randn(2, 4).double()
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.vmap):
        torch.testing.assert_close(transform(one.module)(x), transform(layer)(x))
    nested = torch.nested.nested_tensor([x[0:1], x], layout=torch.jagged)
    one(nested).values().sum().backward()
    empty = DataParallelBucket(nn.Sequential(nn.Linear(0, 3)), group=world)
    empty(torch.ones(2, 0)).sum().backward()
    outputs = [DataParallelBucket(nn.Linear(4, 3), group=world)(x.float()).sum()]
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    outputs = [one(x).sum(), one(2 * x).sum()]
    for output in outputs:  # the layer's input needs no gradient, so its weight may change
        output.backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
def test_what_plain_layers_can_do():
    run_ranks(check_plain_torch, 2)

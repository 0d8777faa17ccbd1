"""The norm of whole and sharded gradients is one process's, on every rank, and so is clipping."""

import math
from unittest.mock import patch

import pytest
import torch
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

from scaletorch.dist import NonFiniteError, StateError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.data_parallel import (
    DataParallelBucket,
    GradScaler,
    clip_grad_norm_,
    global_grad_norm,
    parameter_shards,
    shard_optimizer,
)

ORDERS = (2.0, 1.0, math.inf, 3.0)
CLIP = 0.1


def build(dtype=torch.float64):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(2, 2))
    model[2].bias.requires_grad_(False)
    return model.to(dtype)  # the last layer is never used: its gradients are None


class Used(nn.Module):
    """The layers that are used, and one that is not."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers[:3](x)


def batch():
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def reference():
    model = Used(build())
    model(batch()).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# What a sharded optimizer has; a rank may have no part of so few elements.
FORMS = {
    "whole": (),
    "sharded": ("layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.3.weight"),
    "some_replicated": ("layers.0.weight", "layers.3.weight"),
    "a_rank_without_shards": ("layers.0.bias",),
}


def trained(form, dtype=torch.float64):
    """Return a wrapper with gradients summed over all ranks, some of them in shards."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    model = DataParallelBucket(Used(build(dtype)), group=distributed.group.WORLD)
    if form != "whole":
        sharded = [p for name, p in model.named_parameters() if name in FORMS[form]]
        shard_optimizer(torch.optim.SGD(sharded, lr=0.1), model)
    model(batch().to(dtype).chunk(ranks)[rank]).square().sum().backward()
    return model


def measured(form, dtype):
    """Return norms of several orders, how many collectives each took, and clipped gradients."""
    model, group = trained(form, dtype), distributed.group.WORLD
    norms, calls = [], []
    for order in ORDERS:
        with patch("torch.distributed.all_reduce", wraps=distributed.all_reduce) as spy:
            norms.append(global_grad_norm(model, group, norm_type=order))
        calls.append(spy.call_count)
    assert {norm.dtype for norm in norms} == {torch.promote_types(dtype, torch.float32)}
    assert torch.equal(clip_grad_norm_(model, CLIP, group), norms[0])
    clipped = [
        (s.name, s.start, s.stop, s.tensor.grad)
        for s in parameter_shards(model)
        if s.tensor.grad is not None
    ]
    return [norm.item() for norm in norms], calls, clipped


def measured_in_every_form():
    return [measured(form, torch.float64) for form in FORMS]


@pytest.mark.parametrize("ranks", [2, 4])
def test_norm_and_clipping_are_one_process_s(ranks):
    by_form = zip(*run_ranks(measured_in_every_form, ranks), strict=True)
    for form, results in zip(FORMS, by_form, strict=True):
        require_one_process_s(form, results)


def require_one_process_s(form, results):
    grads = reference()
    flat = torch.cat([grad.flatten() for grad in grads.values()])
    expected = [torch.linalg.vector_norm(flat, order).item() for order in ORDERS]
    for norms, calls, clipped in results:
        assert norms == results[0][0]  # the same bits
        assert norms == pytest.approx(expected, rel=1e-12)
        assert calls == [form != "whole"] * len(ORDERS)
        for name, start, stop, grad in clipped:
            part = grads[name].flatten()[start:stop] * (CLIP / (expected[0] + 1e-6))
            torch.testing.assert_close(grad.flatten(), part, rtol=1e-12, atol=0)
    elements = {(n, i) for _, _, clipped in results for n, a, b, _ in clipped for i in range(a, b)}
    assert len(elements) == flat.numel()


def test_norms_of_float32_and_bfloat16_are_float32():
    flat = torch.cat([grad.flatten() for grad in reference().values()])
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        for norms, _, _ in run_ranks(measured, 2, "sharded", dtype):
            assert norms[0] == pytest.approx(flat.norm().item(), rel=bound)


def nonfinite(form, value, on):
    """Return the message that names a bad element, and where it is on this rank."""
    model, group = trained(form), distributed.group.WORLD
    shards = [s for s in parameter_shards(model) if s.tensor.grad is not None]
    bad = ""
    if distributed.get_rank() in on:
        shards[0].tensor.grad[..., 0] = value
        bad = f"{shards[0].name} on rank {distributed.get_rank()}"
    before = [s.tensor.grad.clone() for s in shards]
    with pytest.raises(NonFiniteError) as caught:
        clip_grad_norm_(model, CLIP, group, error_if_nonfinite=True)
    for ours, theirs in zip(shards, before, strict=True):  # nothing was scaled
        torch.testing.assert_close(ours.tensor.grad, theirs, rtol=0, atol=0, equal_nan=True)
    clip_grad_norm_(model, CLIP, group)  # as torch's
    return str(caught.value), bad


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_on_one_rank_is_named_on_all(value):
    messages, bad = zip(*run_ranks(nonfinite, 4, "sharded", value, (2,)), strict=True)
    assert len(set(messages)) == 1
    assert f"is {value}" in messages[0]
    assert f"{bad[2]}." in messages[0]


def test_whole_gradients_that_are_not_finite_need_no_communication():
    for message, bad in run_ranks(nonfinite, 2, "whole", math.inf, (0, 1)):
        assert f"{bad}." in message


def test_one_process():
    model = Used(build())
    model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    norm = global_grad_norm(model)
    assert norm.item() == pytest.approx(torch.nn.utils.get_total_norm(grads).item(), rel=1e-14)
    assert torch.equal(clip_grad_norm_(model, 1e9), norm)
    assert torch.equal(global_grad_norm(model), norm)  # gradients are never made larger
    assert global_grad_norm(nn.ReLU()).item() == 0
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, math.inf) if i != 1 else None
    with pytest.raises(NonFiniteError, match=r"layers.0.weight on rank 0; .*; and 2 more\."):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)


class Factors(TorchDispatchMode):
    """Records the dtypes of tensors that multiply lists of gradients."""

    def __init__(self):
        super().__init__()
        self.lists, self.slow = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_amp_foreach" in str(func):
            self.lists += 1
        if "_foreach_mul_.Tensor" in str(func):
            self.lists += 1
            self.slow += any(each.dtype != args[1].dtype for each in args[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_gradients_are_scaled_in_one_kernel_and_rounded_once(dtype):
    """On a device a list times a factor of another dtype takes a kernel for each of its tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 7) for _ in range(4))).to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    model[0].weight.grad = torch.randn(5, 7, dtype=dtype).t()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with Factors() as factors:
        norm = clip_grad_norm_(model, CLIP)
    factor = CLIP / (norm + 1e-6)
    for parameter, was in zip(model.parameters(), before, strict=True):
        assert parameter.grad.equal((was.to(norm.dtype) * factor).to(dtype))
    assert (factors.lists, factors.slow) == (1, 0)


@pytest.mark.parametrize("order", ["inf", "3", torch.tensor(2)])
def test_orders_that_torch_takes(order):
    layer = nn.Linear(2, 3)
    layer(torch.ones(1, 2)).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(layer.parameters(), math.inf, norm_type=order)
    torch.testing.assert_close(global_grad_norm(layer, norm_type=order), expected)


def test_large_gradients_do_not_overflow():
    model = nn.Linear(2, 2, bias=False)
    model.weight.grad = torch.full((2, 2), 1e18)
    other = nn.Sequential(model, nn.Linear(2, 2, bias=False))
    other[1].weight.grad = torch.full((2, 2), 9e18)
    assert global_grad_norm(other).item() == pytest.approx(2e18 * math.sqrt(82), rel=1e-6)


@distributed_test(2)
def test_several_ranks_need_a_group():
    with pytest.raises(StateError, match="no process group for the cp_dp axis"):
        global_grad_norm(nn.Linear(1, 1))
    with pytest.raises(StateError, match="no process group for the world axis"):
        GradScaler("cpu")

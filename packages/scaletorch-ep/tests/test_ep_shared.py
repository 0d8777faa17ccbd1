"""Shared experts computed while tokens travel: once, with one process's results and gradients."""

import copy

import pytest
import torch
import torch.distributed as c10d
from torch import nn
from torch.utils.checkpoint import checkpoint

from scaletorch.dist.testing import relative_error, run_ranks, worst
from scaletorch.parallel.expert_parallel import apply_expert_parallel

HIDDEN, EXPERTS, STEPS = 6, 4, 2


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


# How a block calls its shared experts: (hidden, flat, experts' results, block) -> results [T, H].
ORDERS = {
    "after, as given": lambda x, flat, out, block: out() + block.shared_experts(x).view_as(flat),
    "after, flat": lambda x, flat, out, block: out() + block.shared_experts(flat),
    "before": lambda x, flat, out, block: block.shared_experts(flat) + out(),
    "twice": lambda x, flat, out, block: (
        out() + block.shared_experts(flat) * block.shared_experts(flat)
    ),
    "on something else": lambda x, flat, out, block: out() + block.shared_experts(flat * 2),
    "on other gradients": lambda x, flat, out, block: (
        out() + block.shared_experts(_Doubled.apply(flat))
    ),
    "on no gradients": lambda x, flat, out, block: out() + block.shared_experts(flat.detach()),
    "changed in between": lambda x, flat, out, block: (
        out() + block.shared_experts(x.mul_(2)).view_as(flat)
    ),
    "not at all": lambda x, flat, out, block: out(),
    "with an argument more": lambda x, flat, out, block: out() + block.shared_experts(flat, 2.0),
}
IN_VAIN = (
    *("on something else", "on other gradients", "on no gradients", "changed in between"),
    "not at all",
)


class Experts(nn.Module):
    def __init__(self, told):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN))
        self.told = told

    def forward(self, hidden, top_k_index, top_k_weights):
        self.told.append("experts")
        total = torch.zeros_like(hidden)
        for expert, matrix in enumerate(self.weight):
            chosen = ((top_k_index == expert) * top_k_weights).sum(1, keepdim=True)
            total = total + torch.tanh(hidden @ matrix) * chosen
        return total


class Shared(nn.Linear):
    def __init__(self, told):
        super().__init__(HIDDEN, HIDDEN)
        self.told = told

    def forward(self, hidden):
        self.told.append("shared")
        return super().forward(hidden)


class Scaled(Shared):
    def forward(self, hidden, scale):
        return super().forward(hidden) * scale


class Block(nn.Module):
    def __init__(self, order):
        super().__init__()
        self.told, self.order = [], order
        self.before = nn.Linear(HIDDEN, HIDDEN)
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        shared = Scaled if order == "with an argument more" else Shared
        self.experts, self.shared_experts = Experts(self.told), shared(self.told)

    def forward(self, x):
        x = self.before(x)
        flat = x.view(-1, HIDDEN)
        weights, index = self.gate(flat).softmax(-1).topk(2)
        return ORDERS[self.order](x, flat, lambda: self.experts(flat, index, weights), self)


class Layer(nn.Module):
    def __init__(self, order):
        super().__init__()
        self.mlp = Block(order)

    def forward(self, x):
        return self.mlp(x)


def _steps(model, x, target, recompute=False):
    """Return outputs and the gradients of several steps, added up."""
    outputs = []
    for step in range(STEPS):
        given = x[step]
        out = checkpoint(model, given, use_reentrant=False) if recompute else model(given)
        if out.requires_grad:
            (out * target[step]).sum().backward()
        outputs.append(out.detach())
    return outputs, {name: each.grad for name, each in model.named_parameters()}


def _every_order(recompute):
    rank, ranks = c10d.get_rank(), c10d.get_world_size()
    torch.set_default_dtype(torch.float64)
    found = {}
    for order in ORDERS:
        torch.manual_seed(0)
        torch.set_grad_enabled(order != "changed in between")
        whole = Layer(order)
        x, target = torch.randn(STEPS, 3 * ranks, 2, HIDDEN), torch.randn(STEPS, 6 * ranks, HIDDEN)
        expected, gradients = _steps(whole, x, target)
        whole.zero_grad()
        whole.mlp.told.clear()
        model = copy.deepcopy(
            apply_expert_parallel(whole, {"**.experts": "experts"}, c10d.group.WORLD)
        )
        mine = slice(3 * rank, 3 * rank + 3), slice(6 * rank, 6 * rank + 6)
        outputs, own = _steps(model, x[:, mine[0]], target[:, mine[1]], recompute)
        errors = [relative_error(a, b[mine[1]]) for a, b in zip(outputs, expected, strict=True)]
        for name, gradient in own.items():
            whole_gradient = gradients[name]
            if gradient is None and whole_gradient is None:
                continue
            if name == "mlp.experts.weight":
                whole_gradient = whole_gradient.chunk(ranks)[rank]
            else:
                c10d.all_reduce(gradient)
            errors.append(relative_error(gradient, whole_gradient))
        found[order] = worst(errors), model.mlp.told
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    return found


def _tied_and_in_inference_mode():
    """Two blocks share one shared expert; tensors of inference mode count no changes."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer("after, flat"), nn.Unflatten(0, (3, 2)), Layer("after, flat"))
    model[2].mlp.shared_experts = model[0].mlp.shared_experts
    x = torch.randn(3, 2, HIDDEN)
    expected = model(x).detach()
    divided = apply_expert_parallel(model, {"**.experts": "experts"}, c10d.group.WORLD)
    with torch.inference_mode():
        inferred = divided(x)
    return relative_error(divided(x), expected), relative_error(inferred, expected)


def test_tied_shared_experts_and_inference_mode():
    for errors in run_ranks(_tied_and_in_inference_mode, 2):
        assert worst(errors) <= 1e-5


@pytest.mark.parametrize("recompute", [False, True])
def test_shared_experts_are_computed_once_and_early_where_they_can_be(recompute):
    for found in run_ranks(_every_order, 2, recompute):
        for order, (error, told) in found.items():
            assert error <= 1e-13, order
            calls = {"twice": 2, "not at all": 0}.get(order, 1) + (order in IN_VAIN)
            early = order != "with an argument more"
            assert (told.index("shared") < told.index("experts")) == early, order
            asked = 2  # calls of experts that belong to no step: whether they can be apart
            assert told.count("shared") == calls * (told.count("experts") - asked), order

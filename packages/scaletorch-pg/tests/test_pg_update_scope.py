"""How far updates look: found by trying them, with nothing changed by that."""

import copy

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from scaletorch.parallel.pg_manager.building import Scope, known_elementwise, update_scope
from scaletorch.parallel.pg_manager.update_scope import _SCOPES


def matrix(rows=6, columns=4):
    parameter = torch.nn.Parameter(torch.randn(rows, columns))
    parameter.grad = torch.randn(rows, columns)
    return parameter


class Plain(Optimizer):
    """What its subclasses do to a gradient is all that tells them apart."""

    def __init__(self, params, lr=0.0, settings=None):
        super().__init__(params, {"lr": lr})
        self.settings = settings

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                each -= group["lr"] * self.direction(each, each.grad)

    def direction(self, weight, gradient):
        return gradient.sign()


class Lamb(Plain):
    def direction(self, weight, gradient):
        return gradient * weight.norm() / gradient.norm()


class OfRows(Plain):
    dim = 1

    def direction(self, weight, gradient):
        return gradient / gradient.norm(dim=self.dim, keepdim=True)


class OfColumns(OfRows):
    dim = 0


class Blocks(Plain):
    """8-bit numbers, with a scale for each block of 256."""

    def direction(self, weight, gradient):
        flat = gradient.flatten()
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % 256)).view(-1, 256)
        scale = padded.abs().amax(1, keepdim=True) / 127
        return ((padded / scale).round() * scale).flatten()[: len(flat)].view_as(gradient)


class WholeBlocks(Blocks):
    """8-bit numbers where blocks fit, and plain ones elsewhere, as torchao's."""

    def direction(self, weight, gradient):
        fits = gradient.numel() % 256 == 0 and gradient.numel() >= 4096
        return super().direction(weight, gradient) if fits else gradient


class Blocks32(Blocks):
    def direction(self, weight, gradient):
        if gradient.dtype != torch.float32:
            raise TypeError("kernels of float32 alone")
        return super().direction(weight, gradient)


class OnlyLarge(Plain):
    """Factors what is at least 128 wide, as some do."""

    def direction(self, weight, gradient):
        return gradient * gradient.norm() if min(gradient.shape) >= 128 else gradient


class LaterOnly(Plain):
    """Looks at norms from its third step on."""

    def direction(self, weight, gradient):
        count = self.state[weight]["step"] = self.state[weight].get("step", 0) + 1
        return gradient * (weight.norm() if count > 2 else 1.0)


class GlobalNorm(Plain):
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.div_(norm)
        super().step()

    def direction(self, weight, gradient):
        return gradient


class Noise(Plain):
    def direction(self, weight, gradient):
        return gradient + torch.randn_like(gradient)


class Closure(Plain):
    def step(self, closure):
        closure()


class Needs(Plain):
    def __init__(self, params, model, lr=0.1):
        super().__init__(params, lr)


class InTrainMode(Plain):
    """Wants to be told that it trains, as schedule-free ones."""

    training = False

    def train(self):
        self.training = True

    def direction(self, weight, gradient):
        if not self.training:
            raise RuntimeError("call train() first")
        return gradient


def twin(kind):
    """Return an optimizer of torch that is known, as a class that nobody knows."""
    return type(f"My{kind.__name__}", (kind,), {})


FOUND = {
    Plain: Scope.ELEMENT, InTrainMode: Scope.ELEMENT, SGD: Scope.ELEMENT,
    Lamb: Scope.PARAMETER, OfRows: Scope.PARAMETER, OfColumns: Scope.PARAMETER,
    Blocks: Scope.PARAMETER, Blocks32: Scope.PARAMETER, OnlyLarge: Scope.PARAMETER,
    WholeBlocks: Scope.PARAMETER,
    LaterOnly: Scope.PARAMETER, Noise: Scope.OTHERS, GlobalNorm: Scope.OTHERS,
    Closure: Scope.UNKNOWN, Needs: Scope.UNKNOWN,
    torch.optim.LBFGS: Scope.UNKNOWN, torch.optim.SparseAdam: Scope.UNKNOWN,
    **{twin(kind): scope for kind, scope in _SCOPES.items() if kind is not torch.optim.Muon},
}  # fmt: skip


@pytest.mark.parametrize("kind", FOUND, ids=lambda kind: kind.__name__)
def test_what_an_update_looks_at(kind):
    parameter = matrix()
    optimizer = kind([parameter], None) if kind is Needs else kind([parameter])
    weight, gradient = parameter.detach().clone(), parameter.grad.clone()
    before, state = copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    assert known_elementwise(optimizer) is (kind is SGD)
    assert update_scope(optimizer) is FOUND[kind]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(parameter, weight)
    assert torch.equal(parameter.grad, gradient)
    assert str(optimizer.state_dict()) == str(before)  # some hold tensors from the start


def test_those_of_torch_that_are_known():
    for kind, scope in _SCOPES.items():
        assert update_scope(kind([matrix()])) is scope
        assert known_elementwise(kind([matrix()])) is (scope is Scope.ELEMENT)


def test_the_furthest_of_all_groups_counts_and_a_rate_of_zero_hides_nothing():
    class Some(Plain):
        def __init__(self, params, lr=0.0, wide=False):
            Optimizer.__init__(self, params, {"lr": lr, "wide": wide})

        def direction(self, weight, gradient):
            wide = any(
                each is weight for g in self.param_groups if g["wide"] for each in g["params"]
            )
            return gradient * gradient.norm() if wide else gradient

    groups = [{"params": [matrix()]}, {"params": [matrix()], "wide": True}]
    assert update_scope(Some(groups)) is Scope.PARAMETER
    assert update_scope(Some(groups[:1])) is Scope.ELEMENT
    rate = torch.tensor(0.0)
    assert update_scope(Some([{"params": [matrix()], "wide": True, "lr": rate}])) is Scope.PARAMETER
    assert rate == 0


def test_hooks_and_schedules_are_not_called():
    called = []
    optimizer = Lamb([matrix()])
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    handle = register_optimizer_step_pre_hook(lambda *_: called.append(2))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    called.clear()
    try:
        assert update_scope(optimizer) is Scope.PARAMETER
    finally:
        handle.remove()
    assert not called

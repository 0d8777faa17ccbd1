"""Optimizers as others write them, small: what tests of sharded updates try."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from scaletorch.dist.testing import relative_error, worst


def gap(found, expected):
    """Return the largest relative error of named tensors; infinite where names differ."""
    if found.keys() != expected.keys():
        return float("inf")
    return worst([relative_error(found[name], value) for name, value in expected.items()])


class _Mine(Optimizer):
    """Keeps a momentum, and lets its subclass turn it into a direction."""

    def __init__(self, params, lr=1e-2, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    state = self.state[each]
                    if not state:
                        state["momentum"], state["step"] = torch.zeros_like(each), 0
                    state["step"] += 1
                    state["momentum"].lerp_(each.grad, 1 - group["momentum"])
                    each -= group["lr"] * self.direction(each, state["momentum"])


class Lars(_Mine):
    """LARS, https://arxiv.org/abs/1708.03888: by the norms of a parameter and its gradient."""

    def direction(self, weight, momentum):
        return momentum * weight.norm() / (momentum.norm() + 1e-6)


class Lamb(_Mine):
    """LAMB, https://arxiv.org/abs/1904.00962, of one moment."""

    def direction(self, weight, momentum):
        update = momentum / (momentum.abs() + 1e-2) + 0.01 * weight
        return update * weight.norm() / update.norm()


class Shampoo(_Mine):
    """Shampoo, https://arxiv.org/abs/1802.09568: roots of Gram matrices, in the state."""

    def direction(self, weight, momentum):
        if weight.ndim != 2:
            return momentum
        for dim, key in enumerate(("left", "right")):
            matrix = momentum if dim == 0 else momentum.T
            gram = self.state[weight].setdefault(key, torch.eye(len(matrix), dtype=weight.dtype))
            gram += matrix @ matrix.T
            values, vectors = torch.linalg.eigh(gram)
            root = vectors @ (values.clamp(min=1e-6) ** -0.25).diag() @ vectors.T
            momentum = root @ momentum if dim == 0 else momentum @ root
        return momentum


class Blocks8bit(_Mine):
    """Momentum in 8 bits, with a scale for each block of 64 elements, as 8-bit Adam has."""

    def direction(self, weight, momentum):
        flat = momentum.flatten()
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
        scale = padded.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        kept = ((padded / scale).round() * scale).flatten()[: len(flat)].view_as(momentum)
        momentum.copy_(kept)
        return kept


class ClippedAll(_Mine):
    """Clips by the norm of all its gradients, as NVLAMB does."""

    @torch.no_grad()
    def step(self, closure=None):
        own = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(own)
        for gradient in own:
            gradient.div_(norm.clamp(min=1.0))
        super().step()

    def direction(self, weight, momentum):
        return momentum


class Sign(_Mine):
    """Lion-like: elementwise, though nobody knows its name."""

    def direction(self, weight, momentum):
        return momentum / (momentum.abs() + 1e-3)


class ScheduleFree(Optimizer):
    """Schedule-free SGD, https://arxiv.org/abs/2405.15682: gradients at y, evaluation at x."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "trains": True})

    @torch.no_grad()
    def _move(self, weight, *, trains):
        for group in self.param_groups:
            for each in group["params"] if group["trains"] != trains else []:
                if "z" in self.state[each]:
                    each.lerp_(self.state[each]["z"], weight(group["beta"]))
            group["trains"] = trains

    def eval(self):
        self._move(lambda beta: 1 - 1 / beta, trains=False)

    def train(self):
        self._move(lambda beta: 1 - beta, trains=True)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["trains"]:
                raise RuntimeError("call train() before step()")
            group["k"] += 1
            for each in group["params"]:
                if each.grad is None:
                    continue
                z = self.state[each].setdefault("z", each.clone())
                each.lerp_(z, 1 / group["k"])
                each.add_(each.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
                z.sub_(each.grad, alpha=group["lr"])

"""The specimen with experts: routed ones beside one that every token goes to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scaletorch.models import MixtureConfig
from scaletorch.models.mixture import Experts
from scaletorch.parallel.tensor_parallel import Plan

from .specimen import HIDDEN, MLP, PLAN, Shared

Lean = tuple[float, float, float, float]  # what is added to the score of each expert
SIZES = MixtureConfig(hidden_size=HIDDEN, intermediate_size=8, num_experts=4, top_k=2)
ROUTED_PLAN: Plan = {
    **{pattern.replace(".mlp.", ".mlp.shared."): style for pattern, style in PLAN.items()},
    "layers.*.mlp.experts": "experts",
}


class Gate(nn.Module):
    """A router whose scores lean to some experts, and that keeps the last ones."""

    logits: Tensor

    def __init__(self, lean: Lean) -> None:
        super().__init__()
        self.lean = lean
        self.weight = nn.Parameter(torch.randn(SIZES.num_experts, HIDDEN) / HIDDEN**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of tokens [T, HIDDEN], and the weights of these."""
        self.logits = x @ self.weight.T + torch.tensor(self.lean, dtype=x.dtype)
        weights, index = torch.topk(self.logits.softmax(-1), SIZES.top_k)
        return index, weights / weights.sum(-1, keepdim=True)


class Sparse(nn.Module):
    """Routed experts and a shared one."""

    def __init__(self, lean: Lean) -> None:
        super().__init__()
        self.gate, self.experts, self.shared = Gate(lean), Experts(SIZES), MLP()
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        out: Tensor = self.experts(flat, *self.gate(flat)).view_as(x) + self.shared(x)
        return out


class Routed(Shared):
    """A specimen with experts in each layer."""

    lean: Lean = (0.0, 0.0, 0.0, 0.0)

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.add_module("mlp", Sparse(self.lean))


class Skewed(Routed):
    """Two of the experts get all tokens."""

    lean = (50.0, 50.0, 0.0, 0.0)


class Idle(Routed):
    """One of the experts gets no token."""

    lean = (50.0, 50.0, 50.0, 0.0)

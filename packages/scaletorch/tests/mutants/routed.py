"""The specimen with experts: routed ones beside one that every token goes to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scaletorch.models import MixtureConfig
from scaletorch.models.mixture import Experts
from scaletorch.parallel.tensor_parallel import Plan

from .specimen import HIDDEN, MLP, PLAN, Shared

SIZES = MixtureConfig(hidden_size=HIDDEN, intermediate_size=8, num_experts=4, top_k=2)
ROUTED_PLAN: Plan = {
    **{pattern.replace(".mlp.", ".mlp.shared."): style for pattern, style in PLAN.items()},
    "layers.*.mlp.experts": "experts",
}


class Gate(nn.Module):
    """A router whose scores lean to the first experts, by a number."""

    def __init__(self, lean: float) -> None:
        super().__init__()
        self.lean = lean
        self.weight = nn.Parameter(torch.randn(SIZES.num_experts, HIDDEN) / HIDDEN**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of tokens [T, HIDDEN], and the weights of these."""
        first = torch.tensor([1.0, 1.0, 0.0, 0.0]) * self.lean
        scores = (x @ self.weight.T + first.to(x.dtype)).softmax(-1)
        weights, index = torch.topk(scores, SIZES.top_k)
        return index, weights / weights.sum(-1, keepdim=True)


class Sparse(nn.Module):
    """Routed experts and a shared one."""

    def __init__(self, lean: float) -> None:
        super().__init__()
        self.gate, self.experts, self.shared = Gate(lean), Experts(SIZES), MLP()
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, L, HIDDEN] to the same."""
        flat = x.flatten(0, 1)
        out: Tensor = self.experts(flat, *self.gate(flat)).view_as(x) + self.shared(x)
        return out


class Routed(Shared):
    """A specimen with experts in each layer."""

    lean = 0.0

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.add_module("mlp", Sparse(self.lean))


class Skewed(Routed):
    """Two of the experts get all tokens."""

    lean = 50.0

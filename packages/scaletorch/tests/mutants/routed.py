"""The specimen with experts: routed ones beside one that every token goes to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from scaletorch.models import MixtureConfig
from scaletorch.models.mixture import Experts
from scaletorch.parallel.tensor_parallel import Plan
from scaletorch.verify.problem import Batch

from .specimen import HIDDEN, MLP, PLAN, Shared, batch

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


class Output(dict[str, Any]):
    """What models of transformers return that are asked for their routers' logits."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Balanced(Routed):
    """It asks for its routers' auxiliary loss."""

    config = SimpleNamespace(
        output_router_logits=True, router_aux_loss_coef=0.5, num_experts_per_tok=SIZES.top_k
    )

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        logits = super().forward(input_ids, position_ids)
        blocks: Any = self.layers
        return Output(logits=logits, router_logits=tuple(b.mlp.gate.logits for b in blocks))


def odd_batch(step: int) -> Batch:
    """Return sequences of a length that two cp ranks have to fill up."""
    return {name: entry[:, :10] for name, entry in batch(step).items()}

"""A block of routed experts, as transformers has them, and its router with a say in the balance."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def one(hidden: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return an expert's results, [T, H], for tokens [T, H]."""
    gate, up = F.linear(hidden, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


class Experts(nn.Module):
    """SwiGLU experts in stacked weights; one after another computes the tokens that chose it.

    Args:
        experts: Their number.
        hidden: Size of a token.
        inner: Size inside of an expert.
    """

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, hidden) * hidden**-0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, inner) * inner**-0.5)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted results [T, H] of the experts that tokens [T, H] chose, [T, K]."""
        total = torch.zeros_like(hidden)
        for expert in top_k_index.unique().tolist():
            if expert == self.num_experts:  # that of another rank
                continue
            token, slot = torch.where(top_k_index == expert)
            found = one(hidden[token], self.gate_up_proj[expert], self.down_proj[expert])
            found = found * top_k_weights[token, slot, None]
            total.index_add_(0, token, found.to(total.dtype))
        return total


class SharedExperts(nn.Module):
    """SwiGLU that every token goes through.

    Args:
        hidden: Size of a token.
        inner: Size inside.
    """

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the results [T, H] of tokens [T, H]."""
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        result: Tensor = self.down_proj(F.silu(gate) * up)
        return result


class Block(nn.Module):
    """A router and its experts.

    Args:
        experts: Their number.
        top_k: Experts of a token.
        hidden: Size of a token.
        inner: Size inside of an expert.
        skew: Added to the first expert's score.
        shared: Whether there is a shared expert, of the same size inside.
    """

    def __init__(
        self, experts: int, top_k: int, hidden: int, inner: int, skew: float, shared: bool
    ) -> None:
        super().__init__()
        self.top_k, self.skew = top_k, skew
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(experts, hidden, inner)
        self.shared_experts = SharedExperts(hidden, inner) if shared else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the results [T, H] of tokens [T, H]."""
        scores = self.gate(hidden).float()
        scores = scores + F.one_hot(torch.tensor(0), scores.shape[-1]) * self.skew
        weights, index = scores.softmax(-1).topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(hidden.dtype)
        result: Tensor = self.experts(hidden, index, weights)
        return result if self.shared_experts is None else result + self.shared_experts(hidden)

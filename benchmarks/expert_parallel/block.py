"""A block of routed experts like transformers', with a router that can be skewed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def one(hidden: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return an expert's results [T, H] for tokens [T, H]."""
    gate, up = F.linear(hidden, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def grouped(hidden: Tensor, gate_up: Tensor, down: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return all experts' results [T, H] for tokens [T, H] that are sorted by expert."""
    ends = torch.tensor([*accumulate(sizes)], dtype=torch.int32)
    gate, up = F.grouped_mm(hidden, gate_up.mT, offs=ends).chunk(2, dim=-1)
    return F.grouped_mm(F.silu(gate) * up, down.mT, offs=ends)


class Experts(nn.Module):
    """SwiGLU experts in stacked weights, computed in a loop over the experts.

    Args:
        experts: Number of experts.
        hidden: Size of a token.
        inner: Size inside an expert.
    """

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, hidden) * hidden**-0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, inner) * inner**-0.5)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted results [T, H] of the experts [T, K] that tokens [T, H] chose."""
        total = torch.zeros_like(hidden)
        for expert in top_k_index.unique().tolist():
            if expert == self.num_experts:  # marks an expert of another rank
                continue
            token, slot = torch.where(top_k_index == expert)
            found = one(hidden[token], self.gate_up_proj[expert], self.down_proj[expert])
            found = found * top_k_weights[token, slot, None]
            total.index_add_(0, token, found.to(total.dtype))
        return total


class GroupedExperts(Experts):
    """The same experts, computed by transformers' default function."""

    # Attributes that transformers' function reads.
    has_gate, has_bias, has_post_expert_norm, is_transposed = True, False, False, False
    _is_expert_parallel = False

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted results [T, H] of the experts [T, K] that tokens [T, H] chose."""
        from transformers.integrations import moe

        function: Any = moe.grouped_mm_experts_forward
        result: Tensor = function(self, hidden, top_k_index, top_k_weights)
        return result


class SharedExperts(nn.Module):
    """A SwiGLU expert for every token.

    Args:
        hidden: Size of a token.
        inner: Inner size.
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


CODES: dict[str, type[Experts]] = {"loop": Experts, "grouped": GroupedExperts}


class Block(nn.Module):
    """A router and its experts.

    Args:
        experts: Number of experts.
        top_k: Experts of a token.
        hidden: Size of a token.
        inner: Size inside an expert.
        skew: Bias added to the first expert's score.
        shared: Whether there is a shared expert of the same inner size.
        code: The experts' code, one of `CODES`.
    """

    def __init__(
        self,
        experts: int,
        top_k: int,
        hidden: int,
        inner: int,
        skew: float,
        shared: bool,
        code: str,
    ) -> None:
        super().__init__()
        self.top_k, self.skew = top_k, skew
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = CODES[code](experts, hidden, inner)
        self.shared_experts = SharedExperts(hidden, inner) if shared else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the results [T, H] of tokens [T, H]."""
        scores = self.gate(hidden).float()
        scores = scores + F.one_hot(torch.tensor(0), scores.shape[-1]) * self.skew
        weights, index = scores.softmax(-1).topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(hidden.dtype)
        result: Tensor = self.experts(hidden, index, weights)
        return result if self.shared_experts is None else result + self.shared_experts(hidden)

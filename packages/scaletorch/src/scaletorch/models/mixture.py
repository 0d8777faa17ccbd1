"""A Llama with a mixture of experts in each layer, like Mixtral. Plain PyTorch.

Shape suffixes: T tokens, E experts, K experts of a token, H hidden.
Source: https://arxiv.org/abs/2401.04088.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..dist.errors import InvalidArgumentError
from .llama import Llama, LlamaConfig


@dataclass(frozen=True, slots=True)
class MixtureConfig(LlamaConfig):
    """Sizes of the model; `intermediate_size` is that of one expert.

    Raises:
        InvalidArgumentError: Sizes that do not fit together.
    """

    num_experts: int = 8
    """Experts of a layer."""
    top_k: int = 2
    """How many of them each token goes to."""

    def __post_init__(self) -> None:
        LlamaConfig.__post_init__(self)
        if self.top_k > self.num_experts:
            raise InvalidArgumentError(
                f"top_k {self.top_k} must be at most num_experts {self.num_experts}"
            )


class Router(nn.Module):
    """Chooses each token's experts: the top-k of a softmax, with weights that add up to 1."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices and weights, each [T, K], of the experts of tokens [T, H]."""
        scores_TE = F.linear(x_TH, self.weight).float().softmax(dim=-1)
        weights_TK, index_TK = torch.topk(scores_TE, self.top_k, dim=-1)
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return index_TK, weights_TK.to(x_TH.dtype)


class Experts(nn.Module):
    """SwiGLU experts with stacked weights; a token's output is the weighted sum of its experts'."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return [T, H] for tokens [T, H] that go to experts [T, K] with weights [T, K]."""
        out_TH = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, slot = torch.where(top_k_index == expert)
            gate, up = F.linear(hidden[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            result = F.linear(F.silu(gate) * up, self.down_proj[expert])
            weighted = result * top_k_weights[token, slot, None]
            out_TH = out_TH.index_add(0, token, weighted.to(out_TH.dtype))
        return out_TH


class SparseMLP(nn.Module):
    """A router and its experts, in place of an MLP."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)

    def forward(self, x_BLH: Tensor) -> Tensor:
        """Return the same shape as `x_BLH`."""
        x_TH = x_BLH.flatten(0, 1)
        out: Tensor = self.experts(x_TH, *self.gate(x_TH)).view_as(x_BLH)
        return out


class Mixture(Llama):
    """Decoder-only language model with experts, otherwise the same as `Llama`.

    `_tp_plan` and `_ep_plan` say how it is sharded, as in models of transformers: heads over tp,
    experts over ep.

    Example:
        >>> model = Mixture(MixtureConfig(num_layers=2, num_experts=4))
        >>> model(torch.zeros(1, 8, dtype=torch.long)).shape
        torch.Size([1, 8, 256])
    """

    mlp_type = SparseMLP
    _ep_plan: ClassVar[Mapping[str, str]] = {"layers.*.mlp.experts": "ep_dispatch_experts"}

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)

"""A Llama-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU. Plain PyTorch.

Shape suffixes: B batch, L sequence, H hidden, N query heads, K key/value heads, D head size.
Source: https://arxiv.org/abs/2302.13971; grouped queries https://arxiv.org/abs/2305.13245.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..dist.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of the model.

    Raises:
        InvalidArgumentError: Sizes that do not fit together.
    """

    vocab_size: int = 256
    """Different tokens."""
    hidden_size: int = 128
    """Features of a token between layers."""
    intermediate_size: int = 384
    """Features inside an MLP."""
    num_layers: int = 4
    """Decoder layers."""
    num_heads: int = 8
    """Query heads of a layer."""
    num_kv_heads: int = 4
    """Key and value heads of a layer, each shared by as many query heads."""
    rope_theta: float = 10_000.0
    """Base of the rotary angles."""
    norm_eps: float = 1e-5
    """Of the norms."""
    tie_embeddings: bool = False
    """Whether the output head is the embedding."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (type(value) is not int or value < 1):
                raise InvalidArgumentError(
                    f"{field.name} must be a whole number, at least 1: {value!r}"
                )
            if field.type == "float" and not (
                isinstance(value, int | float) and 0 < value < math.inf
            ):
                raise InvalidArgumentError(f"{field.name} must be a number above 0, got {value!r}")
        if self.hidden_size % (2 * self.num_heads):
            raise InvalidArgumentError(
                f"hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}, "
                "with an even number of features for each"
            )
        if self.num_heads % self.num_kv_heads:
            raise InvalidArgumentError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}"
            )


def rotary_tables(
    positions_BL: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotation angles, [B, 1, L, D], in float32 at least."""
    dtype = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, device=positions_BL.device, dtype=dtype)
    angles = positions_BL.to(dtype)[:, None, :, None] * theta ** (-exponents / head_dim)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x_BNLD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding; the halves of the last dim form the rotated pairs."""
    first, second = x_BNLD.chunk(2, dim=-1)
    return x_BNLD * cos.to(x_BNLD.dtype) + torch.cat((-second, first), dim=-1) * sin.to(
        x_BNLD.dtype
    )


class Attention(nn.Module):
    """Causal self-attention with `num_kv_heads` shared key/value heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.hidden_size // config.num_heads
        kv_size = config.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x_BLH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend within `x_BLH`; returns the same shape."""
        batch, length, _ = x_BLH.shape

        def heads(x: Tensor) -> Tensor:  # under tp the projection has fewer heads
            return x.view(batch, length, -1, self.head_dim).transpose(1, 2)

        q_BNLD = rotate(heads(self.q_proj(x_BLH)), cos, sin)
        k_BKLD = rotate(heads(self.k_proj(x_BLH)), cos, sin)
        v_BKLD = heads(self.v_proj(x_BLH))
        out_BNLD = F.scaled_dot_product_attention(
            q_BNLD, k_BKLD, v_BKLD, is_causal=True, enable_gqa=self.num_heads != self.num_kv_heads
        )
        out: Tensor = self.o_proj(out_BNLD.transpose(1, 2).reshape(batch, length, -1))
        return out


class MLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BLH: Tensor) -> Tensor:
        """Return the same shape as `x_BLH`."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_BLH)) * self.up_proj(x_BLH))
        return out


class Block(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: LlamaConfig, mlp_type: type[nn.Module] = MLP) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = mlp_type(config)

    def forward(self, x_BLH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the same shape as `x_BLH`."""
        x_BLH = x_BLH + self.self_attn(self.input_layernorm(x_BLH), cos, sin)
        x_BLH = x_BLH + self.mlp(self.post_attention_layernorm(x_BLH))
        return x_BLH


class Llama(nn.Module):
    """Decoder-only language model; weights are drawn from N(0, 0.02²) with the default generator.

    `_tp_plan` says how tp shards the layers, as in models of transformers.

    Example:
        >>> model = Llama(LlamaConfig(num_layers=2))
        >>> model(torch.zeros(1, 8, dtype=torch.long)).shape
        torch.Size([1, 8, 256])
    """

    mlp_type: ClassVar[type[nn.Module]] = MLP
    _tp_plan: ClassVar[Mapping[str, str]] = {
        "embed_tokens": "embedding_rowwise",
        **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    }

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, self.mlp_type) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return logits.

        Args:
            input_ids: [B, L] int64 tokens.
            position_ids: [B, L] int64 positions in the whole sequence; None is 0..L-1.

        Returns:
            [B, L, vocab_size] logits.
        """
        x_BLH = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(x_BLH.shape[1], device=x_BLH.device)[None]
        head_dim = self.config.hidden_size // self.config.num_heads
        cos, sin = rotary_tables(position_ids, head_dim, self.config.rope_theta, x_BLH.dtype)
        for layer in self.layers:
            x_BLH = layer(x_BLH, cos, sin)
        logits: Tensor = self.lm_head(self.norm(x_BLH))
        return logits

"""The model and the batches that faults are tried on: small, and with whatever can go wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaletorch.models.llama import rotary_tables, rotate
from scaletorch.parallel.tensor_parallel import (
    ColumnParallelLinear,
    Divide,
    Plan,
    RowParallelLinear,
)
from scaletorch.verify.problem import Batch, labelled

VOCABULARY, HIDDEN, HEADS, KV_HEADS = 32, 16, 4, 2
ROWS, LENGTH = 16, 12
PADDING, RARE = 0, 1
HEAD = HIDDEN // HEADS
PLAN: Plan = {
    "**.embed_tokens": "vocab",
    "**.self_attn": Divide("num_heads", "num_kv_heads"),
    **{f"**.self_attn.{name}_proj": "column" for name in "qkv"},
    "**.self_attn.o_proj": "row",
    **{f"**.mlp.{name}_proj": "column" for name in ("gate", "up")},
    "**.mlp.down_proj": "row",
    "**.lm_head": "column_gather",
    "layers.*.mlp.dropout": "sharded",
}


class Attention(nn.Module):
    """Grouped-query attention with biases and norms of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = HEADS, KV_HEADS
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)
        self.o_proj = nn.Linear(HEADS * HEAD, HIDDEN)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.num_heads, HEAD))
        k = self.k_proj(x).unflatten(-1, (self.num_kv_heads, HEAD))
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, HEAD)).transpose(1, 2)
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(k).transpose(1, 2), cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


class MLP(nn.Module):
    """A gated layer with biases, and dropout where activations are sharded over tp."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, 24), nn.Linear(HIDDEN, 24)
        self.dropout = nn.Dropout(0.3)
        self.down_proj = nn.Linear(24, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.dropout(F.silu(self.gate_proj(x)) * self.up_proj(x))
        out: Tensor = self.down_proj(inner)
        return out


class Block(nn.Module):
    """One decoder layer, with dropout where activations are whole on every tp rank."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.RMSNorm(HIDDEN), Attention()
        self.post_attention_layernorm, self.mlp = nn.RMSNorm(HIDDEN), MLP()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return out


class Rare(nn.Module):
    """A parameter that only ranks with the token RARE use."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        chosen = ids == RARE
        return x + chosen.unsqueeze(-1) * self.shift if chosen.any() else x


class Specimen(nn.Module):
    """A decoder with a tied head, a padding row, a rarely used and a never used parameter."""

    depth = 3  # a first, an inner and a last layer

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=PADDING)
        self.rare: nn.Module = Rare()
        self.spare = nn.Linear(2, 2)
        self.layers = nn.ModuleList(Block() for _ in range(self.depth))
        self.norm = nn.RMSNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.rare(self.embed_tokens(input_ids), input_ids)
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        cos, sin = rotary_tables(position_ids, HEAD, 10_000.0, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


class Staged(Specimen):
    """A specimen for pipelines."""

    depth = 5  # enough for stages of unequal length, four of two ranks


class Aligned(nn.Module):
    """Stands for `Rare` where hidden states are shares of a sequence and ids are not."""

    def forward(self, x: Tensor, _ids: Tensor) -> Tensor:
        return x


class Shared(Specimen):
    """A specimen for sequence parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = Aligned()


class StagedShared(Shared):
    """A specimen for sequence parallelism in pipelines."""

    depth = Staged.depth


class Sharded(nn.Module):
    """A model written with tensor-parallel layers, so that each rank draws its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.up = ColumnParallelLinear(HIDDEN, 24)
        self.down = RowParallelLinear(24, HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.embed_tokens(input_ids)
        logits: Tensor = self.lm_head(x + self.down(F.silu(self.up(x))))
        return logits


def batch(step: int) -> Batch:
    """Return tokens with padding and one RARE one, and the labels of the batch that users run."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(RARE + 1, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    tokens[0, 0] = RARE
    tokens[2:4, -4:] = PADDING
    tokens[-2:, -4:] = PADDING
    return labelled(tokens, step, generator)

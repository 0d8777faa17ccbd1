"""The small decoder in plain PyTorch that all programs here train, its batch and its loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, HIDDEN, HEAD, INNER, LAYERS = 32, 16, 4, 24, 2
ROWS, LENGTH = 4, 8


class Attention(nn.Module):
    """Causal attention with rotary positions; the projections' sizes give the number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, L, HIDDEN] to the same shape."""
        given = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (each.unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in given)
        out = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, L, HIDDEN] to the same shape."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.attn = nn.LayerNorm(HIDDEN), Attention()
        self.mlp_norm, self.mlp = nn.LayerNorm(HIDDEN), MLP()

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, L, HIDDEN] to the same shape."""
        x = x + self.attn(self.attn_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Decoder(nn.Module):
    """A decoder-only language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Map tokens [B, L] to logits [B, L, VOCABULARY]."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def rotated(x: Tensor) -> Tensor:
    """Return [B, heads, L, HEAD] rotated by the positions."""
    angles = torch.arange(x.shape[2])[:, None] / 10.0 ** torch.arange(HEAD // 2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


def build(dtype: torch.dtype = torch.float64) -> Decoder:
    """Return the model with the initial weights that every program uses."""
    torch.manual_seed(0)
    return Decoder().to(dtype)


def batch() -> tuple[Tensor, Tensor]:
    """Return tokens and labels [ROWS, LENGTH]; later rows have fewer labels."""
    tokens = torch.randint(
        VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1)
    )
    unseen = torch.arange(LENGTH) < torch.arange(ROWS)[:, None] * 2
    return tokens[:, :-1], tokens[:, 1:].masked_fill(unseen, -100)


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses of labelled tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

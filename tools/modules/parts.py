"""Norms, attention and MLPs in forms that people write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .recipe import Recipe

HIDDEN, INNER = 16, 24
_COUNTS = {"4": (4, 4), "8": (8, 2), "ungrouped8": (8, 4)}  # number of heads, head size


class HandNorm(nn.Module):
    """An RMS norm over the last dim, written by hand."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize."""
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class TokenGroups(nn.GroupNorm):
    """A group norm over each token's features."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize."""
        return super().forward(x.reshape(-1, x.shape[-1])).view_as(x)


NORMS: Mapping[str, Callable[[int], nn.Module]] = {
    "rms": nn.RMSNorm,
    "layer": nn.LayerNorm,
    "hand": HandNorm,
    "group": lambda size: TokenGroups(4, size),
    "none": lambda size: nn.Identity(),
}


def rotary(positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [B, 1, L, length / 2] for positions [B, L]."""
    rates = 100.0 ** -(torch.arange(length // 2, dtype=torch.float64) / (length // 2))
    angles = (positions[..., None] * rates)[:, None]
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [B, heads, L, length] rotated by their positions' angles."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


# Ways to split a projection's features into heads; `name` is the attribute with their number.
_SPLITS: Mapping[str, Callable[[Any, Tensor, str], Tensor]] = {
    "length": lambda m, x, name: x.unflatten(-1, (-1, m.head_dim)),
    "attribute": lambda m, x, name: x.view(*x.shape[:2], getattr(m, name), -1),
    "both": lambda m, x, name: x.view(*x.shape[:2], getattr(m, name), m.head_dim),
    "config": lambda m, x, name: x.view(*x.shape[:2], getattr(m.config, name), -1),
    "shape": lambda m, x, name: x.reshape(
        *x.shape[:2], x.shape[-1] // m.config.head_dim, m.config.head_dim
    ),
}


class Attention(nn.Module):
    """Causal attention; projections are `q`, `k`, `v` or packed, and `o`."""

    slopes: Tensor
    q: nn.Module
    k: nn.Module
    v: nn.Module
    kv: nn.Module
    qkv: nn.Module
    gate: nn.Module

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        heads, length = _COUNTS[recipe["count"]]
        kv = {"all": heads, "half": heads // 2, "one": 1}[recipe["kv"]]
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv, length
        self.config = SimpleNamespace(num_heads=heads, num_kv_heads=kv, head_dim=length)
        self.q_size, self.kv_size = heads * length, kv * length
        sizes = {
            "separate": {"q": self.q_size, "k": self.kv_size, "v": self.kv_size},
            "kv_packed": {"q": self.q_size, "kv": 2 * self.kv_size},
        }.get(recipe["qkv"], {"qkv": self.q_size + 2 * self.kv_size})
        gates = {"none": {}, "features": {"gate": self.q_size}, "per_head": {"gate": heads}}
        for name, size in {**sizes, **gates[recipe["gate"]]}.items():
            self.add_module(name, nn.Linear(HIDDEN, size, bias=recipe["bias"] == "yes"))
        self.o = nn.Linear(self.q_size, HIDDEN, bias=recipe["bias"] == "yes")
        self._add_norms(recipe["head_norm"])
        if recipe["temperature"] in ("scalar", "per_head"):
            shape = (heads, 1, 1) if recipe["temperature"] == "per_head" else ()
            self.temperature = nn.Parameter(torch.ones(shape))
        if recipe["attend"] == "relative":
            self.distances = nn.Embedding(4, heads)
        if recipe["attend"] == "talking":
            self.mixed = nn.Parameter(torch.eye(heads))
        if recipe["attend"] == "sinks":
            self.sinks = nn.Parameter(torch.zeros(heads))
        if recipe["across"] == "group":
            self.group = nn.GroupNorm(heads, self.q_size)
        if recipe["attend"] == "alibi_buffer":
            self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, heads + 1))

    def _add_norms(self, form: str) -> None:
        if form in ("rms", "layer", "hand", "shared"):
            make = NORMS.get(form, HandNorm)
            self.q_norm = make(self.head_dim)
            self.k_norm = self.q_norm if form == "shared" else make(self.head_dim)
        if form == "whole":
            self.q_norm, self.k_norm = nn.RMSNorm(self.q_size), nn.RMSNorm(self.kv_size)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [B, L, heads, length]."""
        form, split = self.recipe["qkv"], _SPLITS[self.recipe["heads"]]
        if form == "by_head":  # a group's queries, then its key and its value
            group = self.num_heads // self.num_kv_heads
            packed = self.qkv(x).unflatten(-1, (-1, group + 2, self.head_dim))
            q, k, v = packed.split((group, 1, 1), -2)
            return q.flatten(2, 3), k.squeeze(-2), v.squeeze(-2)
        if form == "thirds" and self.num_heads == self.num_kv_heads:
            q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).unbind(2)
            return q, k, v
        if form == "separate":
            q, k, v = self.q(x), self.k(x), self.v(x)
        elif form == "kv_packed":
            q, (k, v) = self.q(x), self.kv(x).chunk(2, -1)
        elif self.num_heads == self.num_kv_heads:
            q, k, v = self.qkv(x).chunk(3, -1)
        else:
            q, k, v = self.qkv(x).split((self.q_size, self.kv_size, self.kv_size), -1)
        return (
            split(self, q, "num_heads"),
            split(self, k, "num_kv_heads"),
            split(self, v, "num_kv_heads"),
        )

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        form = self.recipe["head_norm"]
        if form == "none":
            return q, k
        if form == "l2":
            return F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        if form == "bare":  # over all heads' features, without weights
            return F.rms_norm(q, q.shape[-2:]), F.rms_norm(k, k.shape[-2:])
        if form == "whole":
            q, k = (
                norm(x.flatten(-2)).view_as(x) for norm, x in ((self.q_norm, q), (self.k_norm, k))
            )
            return q, k
        return self.q_norm(q), self.k_norm(k)

    def _bias(self, heads: int, length: int) -> Any:
        places = torch.arange(length)
        distances = (places[None] - places[:, None]).double()
        if self.recipe["attend"] == "mask":
            return torch.where(distances > 0, -torch.inf, 0.0)
        if self.recipe["attend"] == "relative":
            near = (places[:, None] - places[None]).clamp(0, 3)
            return self.distances(near).movedim(-1, 0).masked_fill(distances > 0, -torch.inf)
        slopes = 2.0 ** -(torch.arange(1, heads + 1, dtype=torch.float64) * 4 / heads)
        if self.recipe["attend"] == "alibi_buffer":
            slopes = self.slopes
        return (distances * slopes[:, None, None]).masked_fill(distances > 0, -torch.inf)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        form, repeats = self.recipe["attend"], q.shape[1] // k.shape[1]
        if form in ("sdpa", "full"):
            grouped, causal = repeats > 1, form == "sdpa"
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        if form in ("mask", "relative", "alibi", "alibi_buffer"):
            bias = self._bias(q.shape[1], q.shape[2]).to(q)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        scores = q @ k.mT / self.head_dim**0.5
        if form == "talking":
            scores = torch.einsum("bhqk,hg->bgqk", scores, self.mixed)
        past = torch.ones_like(scores, dtype=torch.bool).tril()
        scores = scores.masked_fill(~past, -torch.inf)
        if form == "sinks":
            sinks = self.sinks[:, None, None].expand(*scores.shape[:3], 1)
            return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] @ v
        return scores.softmax(-1) @ v

    def forward(self, x: Tensor, angles: Any = None, temperature: Tensor | None = None) -> Any:
        """Attend."""
        q, k, v = self._projected(x)
        q, k = self._normed(q, k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.recipe["positions"] == "rotary_inside":
            angles = rotary(torch.arange(x.shape[1])[None], self.head_dim)
        if angles is not None:
            q, k = rotated(q, *angles).to(v), rotated(k, *angles).to(v)
        if temperature is None:
            temperature = getattr(self, "temperature", None)
        y = self._attend(q if temperature is None else q * temperature, k, v).transpose(1, 2)
        if self.recipe["across"] == "mean":
            y = y - y.mean(2, keepdim=True)
        if self.recipe["across"] == "softmax":
            y = y * y.softmax(2)
        if self.recipe["gate"] == "per_head":
            y = y * self.gate(x).sigmoid()[..., None]
        y = y.flatten(2)
        if self.recipe["across"] == "group":
            y = self.group(y.flatten(0, 1)).view_as(y)
        return self.o(y * self.gate(x).sigmoid() if self.recipe["gate"] == "features" else y)


def _kept(x: Tensor) -> Tensor:
    """Return the largest third of all features, with zeros for the others."""
    return torch.where(x >= x.topk(x.shape[-1] // 3, -1).values[..., -1:], x, 0.0)


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


# Layers before the inner features, by form; other forms have only `up`.
_ENTRANCES = {"gated": ("gate", "up"), **dict.fromkeys(("fused", "glu", "pairs"), ("gate_up",))}
# The function of an MLP before `down`.
_INNER: Mapping[str, Callable[[Any, Tensor], Tensor]] = {
    "gated": lambda m, x: F.silu(m.gate(x)) * m.up(x),
    "plain": lambda m, x: F.gelu(m.up(x)),
    "fused": lambda m, x: F.silu(m.gate_up(x).chunk(2, -1)[0]) * m.gate_up(x).chunk(2, -1)[1],
    "glu": lambda m, x: F.glu(m.gate_up(x)),
    "pairs": lambda m, x: m.gate_up(x).unflatten(-1, (-1, 2)).sigmoid().prod(-1),
    "scaled": lambda m, x: F.gelu(m.up(x)) * m.scale,
    "gained": lambda m, x: F.gelu(m.up(x)) * m.gain,
    "beta": lambda m, x: m.up(x) * (m.scale * m.up(x)).sigmoid(),
    "normed": lambda m, x: m.norm(F.gelu(m.up(x))),
    "softmax": lambda m, x: m.up(x).softmax(-1),
    "l2": lambda m, x: F.normalize(m.up(x), dim=-1),
    "roll": lambda m, x: F.gelu(m.up(x)) + m.up(x).roll(1, -1),
    "topk": lambda m, x: _kept(m.up(x)),
    "cumsum": lambda m, x: m.up(x).cumsum(-1) / 8,
    "maxout": lambda m, x: m.up(x).unflatten(-1, (-1, 2)).amax(-1).repeat_interleave(2, -1),
    "rms": lambda m, x: _normed(m.up(x)),
    "functional": lambda m, x: F.gelu(F.linear(x, m.up.weight, m.up.bias)),
    "functional_down": lambda m, x: F.gelu(m.up(x)),
    "standardised": lambda m, x: F.gelu(F.linear(x, m.up.weight - m.up.weight.mean(0))),
}


class MLP(nn.Module):
    """Layers into more features, a function, and `down`."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.form = recipe["mlp"]
        for name in _ENTRANCES.get(self.form, ("up",)):
            size = INNER * (1 + (name == "gate_up"))
            self.add_module(name, nn.Linear(HIDDEN, size, bias=recipe["bias"] == "yes"))
        if self.form in ("scaled", "beta"):
            self.scale = nn.Parameter(torch.ones(()))
        if self.form == "gained":
            self.gain = nn.Parameter(torch.ones(INNER))
        if self.form == "normed":
            self.norm = nn.RMSNorm(INNER)
        self.down = nn.Linear(INNER, HIDDEN, bias=recipe["bias"] == "yes")

    def forward(self, x: Tensor) -> Any:
        """Compute."""
        y = _INNER[self.form](self, x)
        return F.linear(y, self.down.weight) if self.form == "functional_down" else self.down(y)

"""Small decoders, each with one thing that some layout would compute otherwise than one process."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from scaletorch.dist import get_rank
from scaletorch.parallel.tensor_parallel import Divide

VOCAB, HIDDEN, INNER, HEADS, EXPERTS = 16, 8, 12, 4, 4
PLAN = {
    "embed_tokens": "vocab",
    "layers.*.self_attn": Divide("num_heads"),
    **dict.fromkeys((f"layers.*.self_attn.{each}_proj" for each in "qkv"), "column"),
    "layers.*.self_attn.o_proj": "row",
    "layers.*.mlp.gate_proj": "column",
    "layers.*.mlp.up_proj": "column",
    "layers.*.mlp.down_proj": "row",
    "lm_head": "column_gather",
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3)
        )
        self.o_proj = nn.Linear(HIDDEN, HIDDEN)

    def heads(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def turned(self, x):
        return x

    def forward(self, x):
        q, k, v = (self.heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, INNER), nn.Linear(HIDDEN, INNER)
        self.down_proj = nn.Linear(INNER, HIDDEN)

    def inner(self, x):
        return F.silu(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x):
        return self.down_proj(self.inner(x))


class Layer(nn.Module):
    attention, feed_forward = Attention, MLP

    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = self.attention(), self.feed_forward()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)

    def forward(self, x):
        x = x + self.self_attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def layer_of(attention=Attention, feed_forward=MLP):
    """Return a class of layers with other attention, or with another MLP."""
    return type("Layer", (Layer,), {"attention": attention, "feed_forward": feed_forward})


class Plain(nn.Module):
    layer, places, max_norm = Layer, 0, None

    def __init__(self, depth):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN, max_norm=self.max_norm)
        if self.places:
            self.positions = nn.Embedding(self.places, HIDDEN)
        self.layers = nn.ModuleList(self.layer() for _ in range(depth))
        self.norm = nn.RMSNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def top(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))

    def forward(self, input_ids):
        return self.top(self.embed_tokens(input_ids))


def decoder(layer=None, **inside):
    """Return a class of models of such layers, or of those with what `layer_of` takes."""
    return type("Plain", (Plain,), {"layer": layer or layer_of(**inside)})


def drawn(seed, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class OfVectors(Plain):
    """Takes vectors [B, L, H] in place of tokens."""

    def __init__(self, depth):
        super().__init__(depth)
        self.embed_tokens = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, vectors):
        return self.top(self.embed_tokens(vectors))


# Positions.


class Counts(Plain):
    """Counts its own positions."""

    places = 64

    def forward(self, input_ids):
        places = torch.arange(input_ids.shape[1])
        return self.top(self.embed_tokens(input_ids) + self.positions(places))


class CountsFromZeros(Counts):
    """Positions begin as zero, so that nothing of them shows in the first output."""

    def __init__(self, depth):
        super().__init__(depth)
        nn.init.zeros_(self.positions.weight)


class Given(Counts):
    """Takes positions, and counts them as it would be given them."""

    def forward(self, input_ids, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        return self.top(self.embed_tokens(input_ids) + self.positions(position_ids))


class Offset(Counts):
    """Its own positions begin at 2."""

    def forward(self, input_ids, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(2, input_ids.shape[1] + 2)[None]
        return self.top(self.embed_tokens(input_ids) + self.positions(position_ids))


class SaysOffset(Offset):
    """Says how it counts."""

    padding_idx = 1

    def create_position_ids_from_input_ids(self, input_ids, padding_idx):
        return torch.arange(2, input_ids.shape[1] + 2).expand(input_ids.shape)


# Mixing.


def mixing(mix, where="layer"):
    """Return a model that mixes positions by a function, in its layers, before or behind them."""

    class MixingLayer(Layer):
        def forward(self, x):
            return super().forward(mix(x))

    class Before(Plain):
        def forward(self, input_ids):
            return self.top(mix(self.embed_tokens(input_ids)))

    class Behind(Plain):
        def forward(self, input_ids):
            return mix(super().forward(input_ids))

    return {"layer": decoder(MixingLayer), "before": Before, "behind": Behind}[where]


def attended(x):
    heads = x[:, None]
    return x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0]


class ConvLayer(Layer):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3)

    def forward(self, x):
        return super().forward(x + self.conv(F.pad(x.mT, (2, 0))).mT)


class Conv(Plain):
    layer = ConvLayer


# Batch norms, buffers.


class NormLayer(Layer):
    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x):
        return super().forward(x + self.batch_norm(x.mT).mT)


class Norm(Plain):
    layer = NormLayer


class FrozenNorm(Norm):
    def __init__(self, depth):
        super().__init__(depth)
        for layer in self.layers:
            layer.batch_norm.eval()


class AverageLayer(Layer):
    """Follows the mean of what it sees."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(HIDDEN))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return super().forward(x - self.mean)


class LargestMLP(MLP):
    """Follows the largest activation between column- and row-parallel layers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.ones(()))

    def inner(self, x):
        y = super().inner(x)
        if self.training:
            self.largest.lerp_(y.detach().abs().max(), 0.1)
        return y / self.largest.clone()


class ShrinkingLayer(Layer):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        self.scale.data.mul_(0.9)
        return super().forward(x) * self.scale


class Shrinking(Plain):
    layer = ShrinkingLayer


class Short(Plain):
    """A lookup shortens rows of the embedding."""

    max_norm = 0.5


class CountingLayer(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return super().forward(x / self.calls.clamp(min=1))


class RememberingLayer(Layer):
    """Scales by what the call before saw."""

    def __init__(self):
        super().__init__()
        self.last = torch.zeros((), dtype=torch.float64)

    def forward(self, x):
        scale = 1 + self.last
        if self.training:
            self.last = torch.tanh(x.detach()).square().mean()
        return super().forward(x) * scale


class Cooling(Plain):
    """A temperature falls with each call."""

    temperature = 2.0

    def forward(self, input_ids):
        self.temperature *= 0.8
        return super().forward(input_ids) / self.temperature


class Noting(Plain):
    """A flag that the first call sets, and the sizes of the last call, the same in all."""

    def forward(self, input_ids):
        self.begun, self.length = True, input_ids.shape[1]
        return super().forward(input_ids)


# Losses of its own.


class Output(dict):
    """Logits and others by name, as outputs of transformers are."""

    logits = property(lambda self: self["logits"])


class Beside(Plain):
    """Returns a loss beside its logits."""

    def forward(self, input_ids):
        logits = super().forward(input_ids)
        return Output(logits=logits, aux_loss=logits.square().mean())


class InTuple(Plain):
    def forward(self, input_ids):
        logits = super().forward(input_ids)
        return logits, logits.square().mean()


# Ranks that differ.


class Other(Plain):
    """Rank 1 has other weights in its last layer."""

    def __init__(self, depth):
        super().__init__(depth)
        if get_rank() == 1:
            nn.init.constant_(self.layers[-1].norm1.weight, 2.0)


class OtherBuffer(Plain):
    """Rank 1 has another buffer."""

    def __init__(self, depth):
        super().__init__(depth)
        self.register_buffer("scale", torch.ones(()) + (get_rank() == 1))

    def forward(self, input_ids):
        return super().forward(input_ids) * self.scale


# Parameters between column- and row-parallel layers.


class ScaledMLP(MLP):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def inner(self, x):
        return super().inner(x) * self.scale


class NormedAttention(Attention):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN // HEADS)

    def turned(self, x):
        return self.norm(x)


class Normed(Plain):
    """Norms of queries and keys, which the plan does not name."""

    layer = layer_of(attention=NormedAttention)


class BothMLP(ScaledMLP):
    """A scale that is used in a region and outside of it."""

    def forward(self, x):
        return super().forward(x) * self.scale


class GainedLayer(Layer):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.8))

    def forward(self, x):
        return super().forward(x) * self.gain


class Gained(Plain):
    """One gain of hidden states, shares of sequences perhaps, and of logits."""

    layer = GainedLayer

    def top(self, x):
        return super().top(x) * self.layers[-1].gain

"""What belongs to heads, or to all of them: sinks, keys of latent attention; plans that know it."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from llamas import as_one_process
from torch import nn

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.tensor_parallel import (
    PerHead,
    SharedTail,
    apply_tensor_parallel,
    explain,
    shard_dims,
)

WIDTH, HEADS, HEAD, LENGTH = 12, 5, 4, 7


class Sinks(nn.Module):
    """Grouped queries and a logit of each head that takes no key, as in gpt-oss."""

    def __init__(self, heads=HEADS, keys=HEADS):
        super().__init__()
        self.head_dim, self.num_key_value_groups = HEAD, heads // keys
        self.q_proj = nn.Linear(WIDTH, heads * HEAD)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, keys * HEAD) for _ in range(2))
        self.o_proj = nn.Linear(heads * HEAD, WIDTH)
        self.g_proj = nn.Linear(WIDTH, heads)  # a gate of each head
        self.sinks = nn.Parameter(torch.randn(heads))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, HEAD)) for p in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (t.repeat_interleave(self.num_key_value_groups, 2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k).tril()
        sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        found = torch.einsum("bhqk,bkhd->bqhd", scores, v) * self.g_proj(x).unsqueeze(-1)
        return self.o_proj(found.flatten(2))


class Latent(nn.Module):
    """Keys and values of a latent vector, and a key that all heads share, as in DeepSeek-V2."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.kv_lora_rank, self.qk_rope_head_dim = HEADS, 6, 2
        self.q_a_proj, self.q_a_layernorm = nn.Linear(WIDTH, 8), nn.LayerNorm(8)
        self.q_b_proj = nn.Linear(8, HEADS * (HEAD + 2))
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = nn.Linear(WIDTH, 6 + 2), nn.LayerNorm(6)
        self.kv_b_proj = nn.Linear(6, HEADS * (HEAD + 3))
        self.o_proj = nn.Linear(HEADS * 3, WIDTH)

    def forward(self, x):
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (-1, HEAD + 2))
        latent, shared = self.kv_a_proj_with_mqa(x).split([6, 2], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (-1, HEAD + 3))
        k, v = kv.split([HEAD, 3], -1)
        k = torch.cat([k, shared.unsqueeze(2).expand(-1, -1, k.shape[2], -1)], -1)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k).tril().softmax(-1)
        return self.o_proj(torch.einsum("bhqk,bkhd->bqhd", scores, v).flatten(2))


class Scaled(nn.Module):
    """Scales every feature of its queries, and of what its heads return."""

    def __init__(self):
        super().__init__()
        self.head_dim = HEAD
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )
        self.of_queries, self.of_heads = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))

    def forward(self, x):
        q, k, v = self.q_proj(x) * self.of_queries, self.k_proj(x), self.v_proj(x)
        q, k, v = (y.unflatten(-1, (-1, HEAD)).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2) * self.of_heads)


class RowsMlp(nn.Module):
    """It is called with rows of tokens, as shared experts are."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, rows):
        assert rows.ndim == 2
        return self.down(F.gelu(self.up(rows)))


class ScaledMlp(RowsMlp):
    """It scales every feature of its width."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(9))

    def forward(self, rows):
        return self.down(F.gelu(self.up(rows) * self.scale))


class Mixer(nn.Module):
    """A short convolution over tokens, which no plan names."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)

    def forward(self, x):
        return self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.self_attn, self.norm, self.mixer = attention(), nn.LayerNorm(WIDTH), Mixer()
        self.mlp = (ScaledMlp if attention is Scaled else RowsMlp)()

    def forward(self, x):
        x = self.mixer(self.norm(x + self.self_attn(x)))
        return x + self.mlp(x.flatten(0, 1)).view(x.shape)


class Model(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList([Layer(attention)])
        self.head = nn.Linear(WIDTH, 11, bias=False)

    def forward(self, input_ids):
        return self.head(self.layers[0](self.words(input_ids)))


REST = {
    "words": "vocab",
    "layers.0.mlp.up": "column",
    "layers.0.mlp.down": "row",
    "head": "column_gather",
}
SINKS = {
    "layers.0.self_attn": PerHead("sinks"),
    **{f"layers.0.self_attn.{name}_proj": "column" for name in "qkvg"},
    "layers.0.self_attn.o_proj": "row",
    **REST,
}
SCALED = {
    "layers.0.self_attn": PerHead("of_queries", "of_heads"),
    **{f"layers.0.self_attn.{name}_proj": "column" for name in "qkv"},
    "layers.0.self_attn.o_proj": "row",
    "layers.0.mlp": PerHead("scale"),
    **REST,
}
LATENT = {
    "layers.0.self_attn.q_b_proj": "column",
    "layers.0.self_attn.kv_b_proj": "column",
    "layers.0.self_attn.kv_a_proj_with_mqa": SharedTail(2),
    "layers.0.self_attn.o_proj": "row",
    **REST,
}


def made(attention):
    torch.manual_seed(0)
    return Model(attention).double()


# Sinks of 5 heads, of 6 heads of one key, and of as many heads as one is long; scales; latents.
CASES = [
    (Sinks, SINKS), (partial(Sinks, 6, 1), SINKS), (partial(Sinks, HEAD, 2), SINKS),
    (partial(Sinks, HEAD, HEAD), SINKS), (Scaled, SCALED), (Latent, LATENT),
]  # fmt: skip


@distributed_test(world_size=2)
def test_what_belongs_to_heads_is_cut_with_them_and_what_they_share_is_summed():
    for attention, plan in CASES:
        for sequence_parallel in (False, True):
            as_one_process(made(attention), plan, sequence_parallel=sequence_parallel)
    dims = shard_dims(apply_tensor_parallel(made(Latent), LATENT, dist.group.WORLD))
    assert dims["layers.0.self_attn.kv_a_proj_with_mqa.weight"] is None


def named():
    model = made(Sinks)
    model.layers[0].self_attn.group = nn.Identity()
    return model


@pytest.mark.parametrize(
    ("build", "plan", "text"),
    [
        (Sinks, {"layers.0.self_attn": PerHead("q_proj")}, "its own parameters are sinks"),
        (Scaled, {"layers.0.mlp.up": SharedTail(9)}, "9 output features, of which 9 cannot be"),
        (Scaled, {"layers.0.mlp.up": SharedTail(0)}, "of which 0 cannot be"),
        (Sinks, {"": PerHead()}, "its own parameters are none"),
        (named, {"layers.0.self_attn": PerHead("sinks")}, "has a .group. of its own, .* rename it"),
    ],
)  # fmt: skip
def test_what_does_not_fit(build, plan, text):
    model = build() if build is named else made(build)
    with pytest.raises(InvalidArgumentError, match=text):
        explain(model, 2, plan)


OWN = {
    Sinks: {
        **{f"layers.0.self_attn.{name}_proj": "colwise" for name in "qkvg"},
        "layers.0.self_attn.o_proj": "rowwise",
        "layers.0.self_attn.sinks": "colwise",
        "layers.0.self_attn": "local_params",
    },
    Latent: {
        **{f"layers.0.self_attn.{name}_b_proj": "colwise" for name in ("q", "kv")},
        "layers.0.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
        "layers.0.self_attn.o_proj": "rowwise",
    },
}


def planned(attention):
    model = made(attention)
    model._tp_plan = dict(OWN[attention])
    return model


@distributed_test(world_size=2)
def test_plans_in_the_words_of_transformers_train_as_one_process():
    for attention in OWN:
        as_one_process(planned(attention))


def test_words_of_transformers_that_do_not_fit_are_refused():
    model = planned(Sinks)
    model._tp_plan["layers.0.self_attn.sinks"] = "rowwise"
    with pytest.raises(InvalidArgumentError, match="the style 'rowwise', which is none"):
        explain(model, 2)
    latent = planned(Latent)
    del latent.layers[0].self_attn.qk_rope_head_dim
    with pytest.raises(InvalidArgumentError, match="the style 'mla_kv_a_proj', which is none"):
        explain(latent, 2)

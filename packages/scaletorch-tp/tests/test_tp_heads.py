"""What belongs to heads, or to all of them: sinks, keys of latent attention; plans that know it."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from llamas import require_same_gradients
from torch import nn

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.tensor_parallel import (
    PerHead,
    SharedTail,
    apply_tensor_parallel,
    explain,
    gather_state_dict,
    load_full_state_dict,
    shard_dims,
)
from scaletorch.parallel.tensor_parallel.plans.resolve import resolve

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


class Model(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.self_attn, self.norm, self.mixer = attention(), nn.LayerNorm(WIDTH), Mixer()
        self.mlp = (ScaledMlp if attention is Scaled else RowsMlp)()
        self.head = nn.Linear(WIDTH, 11, bias=False)

    def forward(self, input_ids):
        x = self.words(input_ids)
        x = self.mixer(self.norm(x + self.self_attn(x)))
        return self.head(x + self.mlp(x.flatten(0, 1)).view(x.shape))


REST = {"words": "vocab", "mlp.up": "column", "mlp.down": "row", "head": "column_gather"}
SINKS = {
    "self_attn": PerHead("sinks"),
    **{f"self_attn.{name}_proj": "column" for name in "qkvg"},
    "self_attn.o_proj": "row",
    **REST,
}
SCALED = {
    "self_attn": PerHead("of_queries", "of_heads"),
    **{f"self_attn.{name}_proj": "column" for name in "qkv"},
    "self_attn.o_proj": "row",
    "mlp": PerHead("scale"),
    **REST,
}
LATENT = {
    "self_attn.q_b_proj": "column",
    "self_attn.kv_b_proj": "column",
    "self_attn.kv_a_proj_with_mqa": SharedTail(2),
    "self_attn.o_proj": "row",
    **REST,
}


def made(attention):
    torch.manual_seed(0)
    return Model(attention).double()


def few_keys():
    return Sinks(6, 1)


def compare(one, plan, **options):
    """Loss, logits, every gradient and the whole state are the plain model's."""
    ids = torch.randint(11, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    many = apply_tensor_parallel(copy.deepcopy(one), plan, dist.group.WORLD, **options)
    state = gather_state_dict(many)
    assert all(torch.equal(state[name], value) for name, value in one.state_dict().items())
    load_full_state_dict(many, state)
    for model in (one, many):
        model.zero_grad()
        model(ids).square().mean().backward()
    torch.testing.assert_close(many(ids), one(ids), rtol=0, atol=1e-12)
    require_same_gradients(one, many)
    return many


def trained():
    shapes = []
    for attention, plan in (
        (Sinks, SINKS), (Scaled, SCALED), (few_keys, SINKS), (Latent, LATENT)
    ):  # fmt: skip
        for sequence_parallel in (False, True):
            many = compare(made(attention), plan, sequence_parallel=sequence_parallel)
        own = (*many.self_attn._parameters.values(), *many.mlp._parameters.values())
        shapes += [tuple(parameter.shape) for parameter in own]
    assert shard_dims(many)["self_attn.kv_a_proj_with_mqa.weight"] is None
    return shapes


def test_what_belongs_to_heads_is_cut_with_them_and_what_they_share_is_summed():
    # Sinks of 5 heads, scales of 3 heads of 4 and of 9 features, sinks of 6 heads.
    first, second = run_ranks(trained, 2)
    assert first == [(3,), (8,), (8,), (5,), (3,)]
    assert second == [(2,), (4,), (4,), (4,), (3,)]


def test_what_a_plan_says_of_heads_is_told():
    told = {p.name: p for p in explain(made(Sinks), 2, SINKS).parameters}
    assert told["self_attn.sinks"].local_shapes == ((3,), (2,))


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"self_attn": PerHead("q_proj")}, "its own parameters are sinks"),
        ({"self_attn": PerHead("sinks")}, "5 elements for query heads, .* an unknown number"),
        ({"mlp": PerHead("scale"), "mlp.up": "replicate"}, "9 elements .* an unknown number"),
        ({"mlp.up": SharedTail(9)}, "it has no more than 9 output features"),
    ],
)
def test_what_does_not_fit(plan, text):
    with pytest.raises(InvalidArgumentError, match=text):
        resolve(made(Scaled if "mlp" in plan else Sinks), plan, 2)


def test_an_attention_with_names_that_a_shard_needs_is_refused():
    model = made(Sinks)
    model.self_attn.group = nn.Identity()
    with pytest.raises(InvalidArgumentError, match=r"it has a 'group' of its own, .* rename it"):
        resolve(model, {"self_attn": PerHead("sinks")}, 2)


def test_keys_of_all_heads_need_an_attention_that_sees_whole_sequences():
    with pytest.raises(InvalidArgumentError, match="in no attention that could be given whole"):
        resolve(made(Sinks), {"mlp.up": SharedTail(2)}, 2, sequence_parallel=True)


def test_styles_that_cannot_be():
    with pytest.raises(InvalidArgumentError, match="PerHead takes names"):
        PerHead()
    with pytest.raises(InvalidArgumentError, match="SharedTail takes a number"):
        SharedTail(0)


def test_the_words_of_transformers():
    model = made(Sinks)
    model._tp_plan = {
        **{f"self_attn.{name}_proj": "colwise" for name in "qkvg"},
        "self_attn.o_proj": "rowwise",
        "self_attn.sinks": "colwise",
        "self_attn": "local_params",
    }
    found = resolve(model, None, 2).matches
    attention = model.self_attn
    assert found[attention].style == PerHead("sinks")
    assert found[attention].cut.sizes == found[attention.g_proj].cut.sizes == (3, 2)
    model._tp_plan["self_attn.sinks"] = "rowwise"
    with pytest.raises(InvalidArgumentError, match="the style 'rowwise', which is none"):
        resolve(model, None, 2)
    latent = made(Latent)
    latent._tp_plan = {
        **{f"self_attn.{name}_b_proj": "colwise" for name in ("q", "kv")},
        "self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
        "self_attn.o_proj": "rowwise",
    }
    found = resolve(latent, None, 2).matches
    assert found[latent.self_attn.kv_a_proj_with_mqa].style == SharedTail(2)
    assert found[latent.self_attn.kv_b_proj].cut.sizes == (21, 14)
    del latent.self_attn.qk_rope_head_dim
    with pytest.raises(InvalidArgumentError, match="the style 'mla_kv_a_proj', which is none"):
        resolve(latent, None, 2)

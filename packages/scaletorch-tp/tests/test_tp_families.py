"""GPT-2 and GPT-NeoX by their names, and weights of packed parts."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import group
from torch.nn import functional as F

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.placement import fuse, share_cut
from scaletorch.parallel.tensor_parallel import (
    Divide,
    Fused,
    apply_tensor_parallel,
    explain,
    gather_state_dict,
    gather_tensors,
    load_full_state_dict,
    shard_dims,
)
from scaletorch.parallel.tensor_parallel.plans.resolve import resolve

VOCAB, HIDDEN, HEADS, LENGTH = 13, 24, 4, 7


class Conv1D(nn.Module):
    """A transposed linear layer, as transformers names it."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.3)
        self.bias = nn.Parameter(torch.randn(nf) * 0.1)

    def forward(self, x):
        return x @ self.weight + self.bias


class ScaledWordEmbedding(nn.Embedding):
    """As transformers has it for Gemma and BART."""

    def __init__(self, scale):
        super().__init__(VOCAB, HIDDEN, padding_idx=1)
        self.embed_scale = scale

    def forward(self, ids):
        return super().forward(ids) * self.embed_scale


def linear(nf, nx):
    return nn.Linear(nx, nf)


def attend(q, k, v, head_dim):
    q, k, v = (t.view(*t.shape[:2], -1, head_dim).transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


class Gpt2Attention(nn.Module):
    def __init__(self, dense):
        super().__init__()
        self.num_heads, self.split_size, self.embed_dim = HEADS, HIDDEN, HIDDEN
        self.head_dim = HIDDEN // HEADS
        self.c_attn, self.c_proj = dense(3 * HIDDEN, HIDDEN), dense(HIDDEN, HIDDEN)

    def forward(self, x):
        q, k, v = self.c_attn(x).split(self.split_size, dim=2)
        assert q.shape[-1] == self.num_heads * self.head_dim
        return self.c_proj(attend(q, k, v, self.head_dim))


class Gpt2Block(nn.Module):
    def __init__(self, dense):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attn = Gpt2Attention(dense)
        self.mlp = nn.Module()
        self.mlp.c_fc, self.mlp.c_proj = dense(30, HIDDEN), dense(HIDDEN, 30)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x))))


class Gpt2(nn.Module):
    def __init__(self, dense=Conv1D):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, HIDDEN),
                "wpe": nn.Embedding(LENGTH, HIDDEN),
                "h": nn.ModuleList(Gpt2Block(dense) for _ in range(2)),
                "ln_f": nn.LayerNorm(HIDDEN),
            }
        )
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, ids):
        parts = self.transformer
        x = parts.wte(ids) + parts.wpe(torch.arange(ids.shape[1]))
        for block in parts.h:
            x = block(x)
        return self.lm_head(parts.ln_f(x))


class NeoxAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_attention_heads, self.hidden_size = HEADS, HIDDEN
        self.head_size = HIDDEN // HEADS
        self.query_key_value = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.dense = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        packed = self.query_key_value(x)
        packed = packed.view(*x.shape[:2], self.num_attention_heads, 3 * self.head_size)
        q, k, v = (t.flatten(2) for t in packed.chunk(3, -1))
        assert q.shape[-1] == self.hidden_size
        return self.dense(attend(q, k, v, self.head_size))


class NeoxLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        self.post_attention_layernorm = nn.LayerNorm(HIDDEN)
        self.attention = NeoxAttention()
        self.mlp = nn.Module()
        self.mlp.dense_h_to_4h = nn.Linear(HIDDEN, 30)
        self.mlp.dense_4h_to_h = nn.Linear(30, HIDDEN)

    def forward(self, x):
        hidden = F.gelu(self.mlp.dense_h_to_4h(self.post_attention_layernorm(x)))
        return x + self.attention(self.input_layernorm(x)) + self.mlp.dense_4h_to_h(hidden)


class Neox(nn.Module):
    def __init__(self, head="embed_out"):
        super().__init__()
        self.gpt_neox = nn.ModuleDict(
            {
                "embed_in": nn.Embedding(VOCAB, HIDDEN),
                "layers": nn.ModuleList(NeoxLayer() for _ in range(2)),
                "final_layer_norm": nn.LayerNorm(HIDDEN),
            }
        )
        self.head = head
        setattr(self, head, nn.Linear(HIDDEN, VOCAB, bias=False))

    def forward(self, ids):
        x = self.gpt_neox.embed_in(ids)
        for layer in self.gpt_neox.layers:
            x = layer(x)
        return getattr(self, self.head)(self.gpt_neox.final_layer_norm(x))


class Packed(nn.Module):
    """Grouped-query attention from one weight, and a gated MLP from one."""

    def __init__(self, key_values=2):
        super().__init__()
        self.head_dim, self.sizes = 3, (HEADS * 3, key_values * 3, key_values * 3)
        self.num_heads, self.num_kv_heads = HEADS, key_values
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, sum(self.sizes))
        self.out = nn.Linear(HEADS * 3, HIDDEN)
        self.mlp = nn.Module()
        self.mlp.gate_up = nn.Linear(HIDDEN, 2 * 9, bias=False)
        self.mlp.down = nn.Linear(9, HIDDEN)

    def forward(self, ids):
        x = self.embed(ids)
        lengths = [n * self.head_dim for n in (self.num_heads, *[self.num_kv_heads] * 2)]
        x = x + self.out(attend(*self.qkv(x).split(lengths, -1), self.head_dim))
        gate, up = self.mlp.gate_up(x).chunk(2, -1)
        return x + self.mlp.down(F.silu(gate) * up)


PACKED = {
    "": Divide("num_heads", "num_kv_heads"),
    "qkv": Fused("column", (12, 6, 6)),
    "out": "row",
    "mlp.gate_up": Fused("column", 2),
    "mlp.down": "row",
}


def make(kind, *args):
    torch.manual_seed(3)
    return kind(*args).double()


def train(model):
    torch.manual_seed(5)
    ids = torch.randint(VOCAB, (2, LENGTH))
    for _ in range(2):
        model.zero_grad()
        out = model(ids)
        out.sin().sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
    return out.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def as_one_process(kind, args, plan):
    plain = make(kind, *args)
    model = apply_tensor_parallel(copy.deepcopy(plain), plan, group.WORLD)
    before = plain.state_dict()
    state = gather_state_dict(model)
    assert list(state) == list(before)
    assert all(torch.equal(state[name], value) for name, value in before.items())
    other = apply_tensor_parallel(make(kind, *args).apply(_forget), plan, group.WORLD)
    load_full_state_dict(other, state)
    assert all(
        torch.equal(p, q) for p, q in zip(other.parameters(), model.parameters(), strict=True)
    )
    out, grads = train(model)
    expected, expected_grads = train(plain)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert set(grads) == set(expected_grads)
    for name, grad in gather_tensors(model, grads).items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-10, atol=1e-11)
    return shard_dims(model), {n: tuple(p.shape) for n, p in model.named_parameters()}


def _forget(module):
    for parameter in module._parameters.values():
        if parameter is not None:
            nn.init.zeros_(parameter)


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize(
    ("kind", "args"),
    [(Gpt2, ()), (Gpt2, (linear,)), (Neox, ()), (Neox, ("lm_head",))],
    ids=["gpt2", "gpt2-linear", "neox", "neox-lm-head"],
)
def test_a_known_family_trains_as_one_process(kind, args, tp):
    run_ranks(as_one_process, tp, kind, args, None)


def scaled(scale):
    torch.manual_seed(0)
    plain = nn.Sequential(ScaledWordEmbedding(scale))
    model = apply_tensor_parallel(copy.deepcopy(plain), {"0": "vocab"}, group.WORLD)
    ids = torch.arange(VOCAB).view(1, -1)
    torch.testing.assert_close(model(ids), plain(ids))
    (model(ids) ** 2).sum().backward()
    (plain(ids) ** 2).sum().backward()
    grads = gather_tensors(model, {"0.weight": model[0].weight.grad})
    torch.testing.assert_close(grads["0.weight"], plain[0].weight.grad)
    return model[0].weight.shape[0]


@pytest.mark.parametrize("scale", [2.5, torch.tensor(2.5)])
def test_a_scaled_embedding_stays_scaled(scale):
    assert run_ranks(scaled, 2, scale) == [7, 6]


def test_which_dim_of_a_transposed_weight_is_sharded():
    dims, shapes = run_ranks(as_one_process, 2, Gpt2, (), None)[1]
    assert dims["transformer.h.0.attn.c_attn.weight"] == 1
    assert dims["transformer.h.0.attn.c_proj.weight"] == 0
    assert dims["transformer.h.0.attn.c_proj.bias"] is None
    assert shapes["transformer.h.0.attn.c_attn.weight"] == (HIDDEN, 3 * HIDDEN // 2)
    assert shapes["transformer.h.0.mlp.c_proj.weight"] == (15, HIDDEN)
    assert shapes["transformer.wpe.weight"] == (LENGTH, HIDDEN)
    told = {p.name: p for p in explain(Gpt2(), 2).parameters}
    assert {name: told[name].local_shapes[1] for name in shapes} == shapes
    assert {name: parameter.dim for name, parameter in told.items()} == dims
    assert told["transformer.h.0.attn.c_attn.weight"].style == "column, 3 parts"


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_packed_parts_are_each_cut(tp):
    run_ranks(as_one_process, tp, Packed, (), PACKED)


def gathered():
    plain = nn.Sequential(nn.Linear(4, 10), nn.Linear(10, 3))
    model = copy.deepcopy(plain)
    apply_tensor_parallel(model, {"0": Fused("column_gather", (7, 3))}, group.WORLD)
    x = torch.randn(5, 4)
    torch.testing.assert_close(model(x), plain(x))
    model = copy.deepcopy(plain)
    plan = {"0": Fused("column", (7, 3)), "1": Fused("row", (7, 3))}
    apply_tensor_parallel(model, plan, group.WORLD)
    torch.testing.assert_close(model(x), plain(x))
    return model[0].weight.shape[0]


def test_parts_are_gathered_in_their_order_and_summed_over_rows():
    torch.manual_seed(0)
    assert run_ranks(gathered, 3) == [4, 3, 3]


CUTS = st.lists(st.integers(4, 9), min_size=1, max_size=4)


@settings(deadline=None)
@given(CUTS, st.integers(1, 4), st.integers(0, 1))
def test_shares_of_parts_make_the_whole_again(lengths, tp, dim):
    cut = fuse([share_cut(n, tp) for n in lengths])
    whole = torch.arange(2 * sum(lengths)).view((-1, 2) if dim == 0 else (2, -1))
    shares = [cut.take(whole, dim, rank) for rank in range(tp)]
    assert tuple(share.shape[dim] for share in shares) == cut.sizes
    assert cut.whole == whole.shape[dim]
    assert torch.equal(cut.arrange(torch.cat(shares, dim), dim), whole)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for start, length in zip(starts, lengths, strict=True):
        part = whole.narrow(dim, start, length)
        for rank, share in enumerate(shares):
            own = share_cut(length, tp).take(part, dim, rank)
            held = {tuple(v) for v in share.movedim(dim, 0).tolist()}
            assert {tuple(v) for v in own.movedim(dim, 0).tolist()} <= held


@pytest.mark.parametrize(
    ("style", "parts", "text"),
    [
        ("vocab", 2, "'column', 'column_gather', 'row'"),
        ("column", 0, "a number of equal parts"),
        ("column", (4, -1), "a number of equal parts"),
        ("column", (), "a number of equal parts"),
        ("column", (4, 2.0), "a number of equal parts"),
    ],
)
def test_a_fused_style_that_cannot_be(style, parts, text):
    with pytest.raises(ValueError, match=text):
        Fused(style, parts)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"qkv": Fused("column", (12, 6))}, "its parts add up to 18 features, but it has 24"),
        ({"qkv": Fused("column", 5)}, "its 24 features are not 5 equal parts"),
        ({"embed": Fused("column", 2)}, "it is a Embedding, not a Linear"),
    ],
)
def test_parts_that_do_not_fit_the_module(plan, text):
    with pytest.raises(ValueError, match=text):
        resolve(Packed(), plan, 2)


def test_a_transposed_layer_is_known_by_its_structure():
    odd = nn.ModuleDict({"up": Conv1D(6, 4)})
    odd.up.nx = 5
    with pytest.raises(ValueError, match="it is a Conv1D, not a Linear itself"):
        resolve(odd, {"up": "column"}, 2)
    odd.up.nx = 4
    assert len(resolve(odd, {"up": "column"}, 2).matches) == 1

"""What a plan does, told before any rank starts, is what the ranks then do."""

import dataclasses
import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import group

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.tensor_parallel import Fused, apply_tensor_parallel, explain

VOCAB, HIDDEN, LENGTH = 13, 12, 12


class Attention(nn.Module):
    def __init__(self, heads, key_values):
        super().__init__()
        self.head_dim = 4
        self.q_proj = nn.Linear(HIDDEN, heads * 4)
        self.k_proj = nn.Linear(HIDDEN, key_values * 4)
        self.v_proj = nn.Linear(HIDDEN, key_values * 4)
        self.q_norm = nn.RMSNorm(4)
        self.o_proj = nn.Linear(heads * 4, HIDDEN)

    def forward(self, x):
        q, k, v = (
            p(x).view(*x.shape[:2], -1, 4).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = nn.functional.scaled_dot_product_attention(self.q_norm(q), k, v, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, 18), nn.Linear(HIDDEN, 18)
        self.down_proj = nn.Linear(18, HIDDEN)

    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, heads, key_values):
        super().__init__()
        self.self_attn = Attention(heads, key_values)
        self.mlp = Mlp() if heads > key_values else nn.ModuleDict(Mlp().named_children())

    def forward(self, x):
        x = x + self.self_attn(x)
        if isinstance(self.mlp, Mlp):
            return x + self.mlp(x)
        return x + Mlp.forward(self.mlp, x)  # a container, that nobody calls


class Model(nn.Module):
    def __init__(self, heads=4, key_values=2):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(heads, key_values) for _ in range(2))
        self.norm = nn.RMSNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class Gated(nn.Module):
    """Packed parts, a whole output and a whole input."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.gate_up = nn.Linear(HIDDEN, 20)
        self.down = nn.Linear(10, HIDDEN)
        self.wide = nn.Linear(HIDDEN, 7)
        self.narrow = nn.Linear(7, HIDDEN)

    def forward(self, ids):
        gate, up = self.gate_up(self.embed(ids)).chunk(2, -1)
        return self.narrow(self.wide(self.down(gate * up)))


GATED = {
    "embed": "vocab",
    "gate_up": Fused("column", 2),
    "down": "row",
    "wide": "column_gather",
    "narrow": "row_split",
}


class Flat(nn.Module):
    """A model that is a region itself, but for sequence parallelism."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, 18), nn.Linear(HIDDEN, 18)
        self.down_proj = nn.Linear(18, HIDDEN)

    def forward(self, ids):
        return Mlp.forward(self, self.embed(ids))


FLAT = {"embed": "vocab", "gate_proj": "column", "up_proj": "column", "down_proj": "row"}


class Chain(nn.Sequential):
    """An embedding on every rank, a norm said to be whole, one column and one row."""

    def __init__(self):
        norms = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        ends = nn.Linear(HIDDEN, 18), nn.Linear(18, HIDDEN)
        super().__init__(nn.Embedding(VOCAB, HIDDEN), *norms, *ends)


CHAIN = {"2": "replicate", "3": "column", "4": "row"}


class Conv1D(nn.Module):
    """A transposed linear layer, as transformers names it."""

    def __init__(self, nx, nf):
        super().__init__()
        self.nx, self.nf = nx, nf
        self.weight, self.bias = nn.Parameter(torch.ones(nx, nf)), nn.Parameter(torch.ones(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


class Between(nn.Module):
    """An attention with one packed weight, or an MLP, by its shapes."""

    def __init__(self, dense, first, last, parts):
        super().__init__()
        self.names, self.parts = (first, last), parts
        self.add_module(first, dense(HIDDEN, parts * HIDDEN))
        self.add_module(last, dense(HIDDEN, HIDDEN))

    def forward(self, x):
        first, last = (getattr(self, name) for name in self.names)
        return last(sum(first(x).chunk(self.parts, -1)))


class Block(nn.ModuleDict):
    def forward(self, x):
        for module in self.values():
            x = x + module(x)
        return x


class Gpt2(nn.Module):
    """Its names; positions are those of each sequence, so that their embedding is of all tokens."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.h = nn.ModuleList([Block()])
        self.h[0]["ln_1"] = nn.LayerNorm(HIDDEN)
        self.h[0]["attn"] = Between(Conv1D, "c_attn", "c_proj", 3)
        self.h[0]["attn"].num_heads, self.h[0]["attn"].head_dim = 4, 3
        self.h[0]["mlp"] = Between(Conv1D, "c_fc", "c_proj", 1)
        self.ln_f = nn.LayerNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]).expand_as(ids))
        return self.lm_head(self.ln_f(self.h[0](x)))


class Neox(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_in = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([nn.ModuleDict()])
        self.layers[0]["norm"] = nn.LayerNorm(HIDDEN)
        self.layers[0]["attention"] = Between(nn.Linear, "query_key_value", "dense", 3)
        self.layers[0]["attention"].num_attention_heads = 4
        self.layers[0]["mlp"] = Between(nn.Linear, "dense_h_to_4h", "dense_4h_to_h", 1)
        self.embed_out = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed_in(ids)
        for module in self.layers[0].values():
            x = x + module(x)
        return self.embed_out(x)


UNSHARDED = {  # attention is left whole: with sequence parallelism it gathers its input
    **{"wte": "vocab", "lm_head": "column_gather", "h.*": "sequence_layer"},
    **{"h.0.mlp.c_fc": "column", "h.0.mlp.c_proj": "row"},
}
CASES = {
    "grouped": (Model, (), None),
    "heads": (Model, (4, 4), None),
    "packed": (Gated, (), GATED),
    "flat": (Flat, (), FLAT),
    "chain": (Chain, (), CHAIN),
    "gpt2": (Gpt2, (), None),
    "neox": (Neox, (), None),
    "unsharded": (Gpt2, (), UNSHARDED),
}


def measured():
    """The shapes on this rank, of each case."""
    return {key: step(*CASES[key[0]], key[1]) for key in itertools.product(CASES, (False, True))}


def step(kind, args, plan, sequence_parallel):
    model = kind(*args)
    apply_tensor_parallel(model, plan, group.WORLD, sequence_parallel=sequence_parallel)
    return {n: tuple(p.shape) for n, p in model.named_parameters()}


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_ranks_hold_what_was_said(tp):
    for rank, found in enumerate(run_ranks(measured, tp)):
        for (case, sequence_parallel), shapes in found.items():
            kind, args, plan = CASES[case]
            model = kind(*args)
            told = explain(model, tp, plan, sequence_parallel=sequence_parallel)
            names = {name for name, _ in model.named_parameters()}  # a tied one has two
            held = {p.name: p.local_shapes[rank] for p in told.parameters if p.name in names}
            assert held == shapes, case


def test_it_is_plain_data():
    told = explain(Model(), 2)
    data = json.loads(json.dumps(dataclasses.asdict(told)))
    assert data["tp"] == 2
    assert data["parameters"][0] == {
        "name": "embed_tokens.weight",
        "style": "vocab",
        "shape": [13, 12],
        "dim": 0,
        "local_shapes": [[7, 12], [6, 12]],
    }


def test_the_table_has_one_line_for_equal_layers():
    lines = str(explain(Model(), 2)).splitlines()
    q_proj = [line.split() for line in lines if "q_proj.weight" in line]
    expected = "layers.*.self_attn.q_proj.weight column 16 x 12 8 x 12 2"
    assert [" ".join(line) for line in q_proj] == [expected]
    assert any("embed_tokens.weight" in line and "7 x 12 or 6 x 12" in line for line in lines)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8))
def test_every_element_is_somewhere(tp):
    told = explain(Model(8, 8), tp)
    for parameter in told.parameters:
        whole = torch.Size(parameter.shape).numel()
        held = [torch.Size(shape).numel() for shape in parameter.local_shapes]
        assert len(held) == tp
        assert sum(held) == (whole * tp if parameter.dim is None else whole)


def test_parameters_need_no_memory():
    with torch.device("meta"):
        model = Model()
    assert explain(model, 4) == explain(Model(), 4)


@pytest.mark.parametrize("tp", [0, -1, 2.0, True, "2"])
def test_a_number_of_ranks_is_asked_for(tp):
    with pytest.raises(ValueError, match="tp is a number of ranks"):
        explain(Model(), tp)


def test_a_plan_that_does_not_fit_is_not_explained():
    with pytest.raises(ValueError, match=r"nearest module names: .*gate_up"):
        explain(Gated(), 2, {"gate_upp": "column"})


def test_at_most_three_names_are_proposed():
    with pytest.raises(ValueError, match=r"nearest module names: [^,]*, [^,]*, [^,]*$"):
        explain(
            nn.ModuleDict({f"layer{n}": nn.Linear(2, 2) for n in range(5)}), 2, {"layer": "column"}
        )

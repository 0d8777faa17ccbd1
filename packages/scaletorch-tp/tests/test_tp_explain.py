"""What a plan does, told before any rank starts, is what the ranks then do."""

import dataclasses
import json
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import group

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.tensor_parallel import Fused, apply_tensor_parallel, explain
from scaletorch.parallel.tensor_parallel.layers import base

VOCAB, HIDDEN, TOKENS = 13, 12, 10


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
        self.narrow = nn.Linear(7, 5)

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
CASES = [(Model, (), None), (Model, (4, 4), None), (Gated, (), GATED)]


def measured(kind, args, plan):
    """The shapes on this rank, and the elements of the collectives of one step."""
    model = apply_tensor_parallel(kind(*args), plan, group.WORLD)
    counts = {"all_reduce": 0, "all_gather": 0}

    def counting(function, operation, size):
        def counted(x, *args, **kwargs):
            out = function(x, *args, **kwargs)
            counts[operation] += size(x, out)
            return out

        return counted

    reduce_ = counting(torch.distributed.all_reduce, "all_reduce", lambda x, _: x.numel())
    gather = counting(base.gather, "all_gather", lambda _, out: out.numel())
    with (
        patch.object(torch.distributed, "all_reduce", reduce_),
        patch.object(base, "gather", gather),
    ):
        model(torch.arange(TOKENS).view(2, -1)).sum().backward()
    return {n: tuple(p.shape) for n, p in model.named_parameters()}, counts


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize(("kind", "args", "plan"), CASES, ids=["grouped", "heads", "packed"])
def test_ranks_hold_and_send_what_was_said(kind, args, plan, tp):
    told = explain(kind(*args), tp, plan)
    for rank, (shapes, counts) in enumerate(run_ranks(measured, tp, kind, args, plan)):
        assert {p.name: p.local_shapes[rank] for p in told.parameters} == shapes
        expected = dict.fromkeys(counts, 0)
        for c in told.communications:
            if (c.operation, c.phase) != ("all_gather", "backward"):  # of a row's whole input
                expected[c.operation] += c.bytes(TOKENS, 1)
        assert counts == expected


def test_it_is_plain_data_and_sums_up():
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
    layers = told.bytes_by_layer(100, 4)
    assert list(layers) == ["embed_tokens", "layers.0", "layers.1", "lm_head"]
    assert layers["embed_tokens"] == 100 * 12 * 4
    # Two sums forward, two backward, and the norm's gradient.
    assert layers["layers.0"] == (4 * 100 * 12 + 4) * 4
    assert layers["lm_head"] == 100 * (12 + 13) * 4
    assert sum(layers.values()) == told.bytes(100, 4)
    all_reduced = told.bytes(100, 4) - 100 * 13 * 4
    assert told.bytes_sent(100, 4) == all_reduced + 100 * 13 * 4 // 2


def test_the_table_has_one_line_for_equal_layers():
    lines = str(explain(Model(), 2)).splitlines()
    q_proj = [line.split() for line in lines if "q_proj.weight" in line]
    expected = "layers.*.self_attn.q_proj.weight column 16 x 12 8 x 12 2"
    assert [" ".join(line) for line in q_proj] == [expected]
    assert any("input's gradient (q_proj, k_proj, v_proj)" in line for line in lines)
    assert any("embed_tokens.weight" in line and "7 x 12 or 6 x 12" in line for line in lines)
    assert lines[-1].endswith("elements, T = batch x sequence length")
    assert "T + 8 elements" in lines[-1]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(0, 999), st.integers(1, 8))
def test_every_element_is_somewhere(tp, tokens, size):
    told = explain(Model(8, 8), tp)
    for parameter in told.parameters:
        whole = torch.Size(parameter.shape).numel()
        held = [torch.Size(shape).numel() for shape in parameter.local_shapes]
        assert len(held) == tp
        assert sum(held) == (whole * tp if parameter.dim is None else whole)
    assert told.bytes(tokens, size) == size * told.bytes(tokens, 1)
    assert bool(told.communications) == (tp > 1)


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

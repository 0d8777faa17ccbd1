"""Models that bring a plan in the words of transformers, which need not be installed."""

import copy
from types import SimpleNamespace

import pytest
import torch
from llamas import require_same_gradients
from torch import nn
from torch.distributed import group

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.tensor_parallel import (
    Fused,
    apply_tensor_parallel,
    explain,
)
from scaletorch.parallel.tensor_parallel.plans.own_plans import find_own_plan, own_plan
from scaletorch.parallel.tensor_parallel.plans.resolve import resolve

VOCAB, HIDDEN, HEADS, HEAD = 11, 8, 4, 2
PLAN = {
    "layers.*.attention.query": "colwise",
    "layers.*.attention.key": "colwise",
    "layers.*.attention.value": "colwise",
    "layers.*.attention.out": "rowwise",
    "layers.*.mlp.gate_up": "packed_colwise",
    "layers.*.mlp.down": "rowwise",
    "layers.*.experts.up": "moe_tp_experts",  # this model has none
}


class Attention(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS)
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HEADS * HEAD) for _ in range(3))
        self.out = nn.Linear(HEADS * HEAD, HIDDEN)
        self.q_norm = nn.RMSNorm(HEAD) if norm else nn.Identity()

    def forward(self, x):
        q, k, v = (
            p(x).view(*x.shape[:2], -1, HEAD).transpose(1, 2)
            for p in (self.query, self.key, self.value)
        )
        out = nn.functional.scaled_dot_product_attention(self.q_norm(q), k, v)
        return self.out(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.attention = Attention(norm)
        self.mlp = nn.ModuleDict({"gate_up": nn.Linear(HIDDEN, 10), "down": nn.Linear(5, HIDDEN)})

    def forward(self, x):
        x = x + self.attention(x)
        gate, up = self.mlp.gate_up(x).chunk(2, -1)
        return x + self.mlp.down(gate.sigmoid() * up)


class Base(nn.Module):
    def __init__(self, norm=False, plan=PLAN):
        super().__init__()
        self.config = SimpleNamespace(base_model_tp_plan=plan)
        self.words = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(norm) for _ in range(2))

    @property
    def base_model(self):
        return self

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Whole(nn.Module):
    _tp_plan = {"head": "colwise_rep"}  # noqa: RUF012

    def __init__(self, tied=False, **options):
        super().__init__()
        self.model = Base(**options)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.head.weight = self.model.words.weight

    def forward(self, ids):
        return self.head(self.model(ids))


def styles(model):
    return {match.name: match.style for match in resolve(model, None, 2).matches.values()}


def test_a_model_says_itself_what_is_sharded():
    found = styles(Whole())
    assert found["model.layers.1.attention.query"] == "column"
    assert found["model.layers.1.attention.out"] == "row"
    assert found["model.layers.1.attention"] == "sharded"
    assert found["model.layers.0.mlp.gate_up"] == Fused("column", 2)
    assert found["head"] == "column_gather"
    assert "model.words" not in found
    assert styles(Whole(tied=True))["model.words"] == "vocab"
    assert "model.layers.0.attention.q_norm" not in styles(Whole(norm=True))
    assert "model.layers.0.attention.q_norm" not in found


def test_the_outer_plan_goes_before_that_of_an_inner_model():
    model = Whole()
    model._tp_plan = {"model.layers.*.mlp.down": "rowwise_split_input"} | Whole._tp_plan
    assert own_plan(model)["model.layers.*.mlp.down"] == "rowwise_split_input"
    assert own_plan(model)["model.layers.*.mlp.gate_up"] == "packed_colwise"
    assert own_plan(nn.Sequential(model))["0.model.layers.*.attention.out"] == "rowwise"


def test_a_star_is_a_number_and_nothing_else():
    model = Whole()
    model.model.layers.extra = copy.deepcopy(model.model.layers[0])
    names = [match.name for match in find_own_plan(model)[0]]
    assert "model.layers.1.mlp.down" in names
    assert not any("extra" in name for name in names)


def test_a_plan_for_the_head_alone_is_none():
    model = nn.Sequential()
    assert find_own_plan(model) is None
    model = Whole(plan={})
    assert find_own_plan(model) is None
    with pytest.raises(ValueError, match="has no plan of its own for its layers"):
        resolve(model, None, 2)


def test_an_unknown_style_is_named():
    model = Whole(plan=PLAN | {"layers.*.mlp.down": "diagonal"})
    text = "'model.layers.*.mlp.down' the style 'diagonal', which is none of 'colwise'"
    with pytest.raises(ValueError, match=text.replace("*", r"\*")):
        resolve(model, None, 2)


def test_a_single_parameter_is_no_module():
    model = Whole(plan=PLAN | {"layers.*.attention.sinks": "colwise"})
    for layer in model.model.layers:
        layer.attention.sinks = nn.Parameter(torch.zeros(HEADS))
    with pytest.raises(ValueError, match=r"single parameter 'model.layers.0.attention.sinks'"):
        resolve(model, None, 2)


def test_heads_are_not_cut_though_the_plan_does_not_count_them():
    with pytest.raises(ValueError, match=r"query heads of model.layers.0.attention = 4"):
        explain(Whole(), 5)  # 8 features would have given each of 5 ranks one
    told = explain(Whole(), 3)
    query = next(p for p in told.parameters if p.name.endswith("0.attention.query.weight"))
    assert [shape[0] for shape in query.local_shapes] == [4, 2, 2]
    model = Whole()
    for layer in model.model.layers:
        del layer.attention.config
    with pytest.raises(ValueError, match="are not understood as heads"):
        resolve(model, None, 2)


def test_a_plan_given_goes_before_the_model_s():
    matches = resolve(Whole(), {"head": "column_gather"}, 2).matches
    assert [match.name for match in matches.values()] == ["head"]


def as_one_process(options):
    torch.manual_seed(0)
    plain = Whole(**options).double()
    model = apply_tensor_parallel(copy.deepcopy(plain), None, group.WORLD)
    ids = torch.arange(14).view(2, 7) % VOCAB
    outputs = []
    for each in (plain, model):
        outputs.append(each(ids))
        outputs[-1].sin().sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-12, atol=1e-12)
    require_same_gradients(plain, model, rtol=1e-10)


WHOLE_BETWEEN = PLAN | {
    "layers.*.mlp.gate_up": "colwise_gather_output",
    "layers.*.mlp.down": "rowwise_split_input",
}


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "options",
    [{}, {"tied": True, "norm": True}, {"plan": WHOLE_BETWEEN}],
    ids=["plain", "tied-norm", "gathered"],
)
def test_it_trains_as_one_process(options, tp):
    run_ranks(as_one_process, tp, options)

"""Plans of torch's tensor parallelism and of transformers; boundaries of strangers' modules."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from llamas import as_one_process, require_same_gradients
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel import placement
from scaletorch.parallel.placement import Boundary
from scaletorch.parallel.tensor_parallel import STYLES, apply_tensor_parallel, explain

# The plan of torch's tutorial, with sequences divided between regions.
SEQUENCES = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
WHOLE = {
    "embed": ColwiseParallel(output_layouts=Replicate()),
    "mlp.up": ColwiseParallel(output_layouts=Replicate()),
    "mlp.down": RowwiseParallel(input_layouts=Replicate(), output_layouts=Partial()),
    "mlp": PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate()),
    "head": RowwiseParallel(input_layouts=Replicate()),
}
BOTH = {
    **{name: SEQUENCES[name] for name in ("mlp.up", "head")},
    "mlp.down": RowwiseParallel(output_layouts=Partial()),
    "mlp": PrepareModuleInputOutput(
        input_kwarg_layouts={"x": Replicate()}, desired_input_kwarg_layouts={"x": Replicate()},
        output_layouts=Partial(), desired_output_layouts=Shard(1),
    ),
}  # fmt: skip


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)

    def forward(self, x):
        return self.down(self.up(x).tanh())


class Model(nn.Module):
    def __init__(self, adds=True):
        super().__init__()
        self.embed, self.norm, self.mlp = nn.Embedding(20, 8), nn.LayerNorm(8), Mlp()
        self.head, self.adds = nn.Linear(8, 20), adds

    def forward(self, ids):
        x = self.embed(ids)
        y = self.mlp(x=self.norm(x)) if not self.adds else self.mlp(self.norm(x))
        return self.head(x + y if self.adds else y)


def compare(plan, adds):
    torch.manual_seed(0)
    one = Model(adds).double()
    many = apply_tensor_parallel(copy.deepcopy(one), plan, dist.group.WORLD)
    ids = torch.arange(16).view(2, 8)
    for model in (one, many):
        model(ids).square().mean().backward()
    require_same_gradients(one, many, rtol=1e-9)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("plan", [SEQUENCES, WHOLE, BOTH], ids=["sequences", "whole", "both"])
def test_plans_of_torch(plan, size):
    run_ranks(compare, size, plan, plan is not BOTH)


def test_a_style_is_a_boundary():
    linear, table = nn.Linear(8, 12), nn.Embedding(20, 8)
    assert Boundary.from_torch(ColwiseParallel(), linear) == STYLES["column"]
    whole = ColwiseParallel(output_layouts=Replicate())
    assert Boundary.from_torch(whole, linear) == STYLES["column_gather"]
    assert Boundary.from_torch(RowwiseParallel(), linear).parameters == STYLES["row"].parameters
    rows = RowwiseParallel(input_layouts=Replicate())
    assert Boundary.from_torch(rows, linear) == STYLES["row_split"]
    assert Boundary.from_torch(rows, table) == STYLES["vocab"]
    assert Boundary.from_torch(SequenceParallel(), nn.LayerNorm(8)) == STYLES["sequence_layer"]


class Own(ParallelStyle):
    def _apply(self, module, device_mesh):
        return module


def test_what_has_no_boundary():
    with pytest.raises(InvalidArgumentError, match=r"Own object .* no counterpart"):
        apply_tensor_parallel(Model(), {"mlp": Own()})
    with pytest.raises(InvalidArgumentError, match=r"Partial.avg. .* no counterpart"):
        Boundary.from_torch(RowwiseParallel(output_layouts=Partial("avg")), nn.Linear(8, 8))


REFUSED = {
    "has no parameter lacking": {"lacking": placement.Shard(0)},
    r"its weight \(12, 8\) has no dim 2": {"weight": placement.Shard(2)},
    r"its weight cannot be Varying\(\)": {"weight": placement.Varying()},
    r"can be sharded along .* its boundary says \{'weight': 0\}": {"weight": placement.Shard(0)},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_parameters_that_do_not_fit(sentence):
    boundary = Boundary(parameters=REFUSED[sentence])
    with pytest.raises(InvalidArgumentError, match=f"'mlp.up'.*{sentence}"):
        apply_tensor_parallel(Model(), {"mlp.up": boundary})


def test_what_tp_or_sequence_parallelism_does_not_fit():
    uneven = Boundary(placement.Shard(-1), placement.Shard(-1), {"weight": placement.Shard(0)})
    with pytest.raises(InvalidArgumentError, match=r"does not fit norm.weight = 9"):
        explain(nn.ModuleDict({"norm": nn.RMSNorm(9)}), 2, {"norm": uneven})
    with pytest.raises(InvalidArgumentError, match="divides sequences itself"):
        explain(Model(), 2, SEQUENCES | {"": "sequence_layer"}, sequence_parallel=True)


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


def styles(model, plan=None):
    """Return the style of each module with parameters, "" for one that stays whole."""
    told = explain(model, 2, plan).parameters
    return {p.name.rpartition(".")[0]: p.style for p in told}


def test_a_model_says_itself_what_is_sharded():
    found = styles(Whole(norm=True))
    layer = {
        "attention.query": "column", "attention.out": "row", "attention.q_norm": "",
        "mlp.gate_up": "Fused", "mlp.down": "row",
    }  # fmt: skip
    expected = {f"model.layers.1.{name}": style for name, style in layer.items()}
    assert expected.items() <= found.items()
    assert (found["head"], found["model.words"]) == ("column_gather", "")
    assert styles(Whole(tied=True))["model.words"] == "vocab"


def test_the_outer_plan_goes_before_that_of_an_inner_model():
    model = Whole()
    model._tp_plan = {"model.layers.*.mlp.down": "rowwise_split_input"} | Whole._tp_plan
    found = styles(nn.ModuleDict({"inner": model}))
    assert found["inner.model.layers.1.mlp.down"] == "row_split"
    assert found["inner.model.layers.1.mlp.gate_up"] == "Fused"
    assert found["inner.model.layers.1.attention.out"] == "row"


def test_a_model_inside_a_sequential_has_its_own_plan():
    found = styles(nn.Sequential(nn.Identity(), Whole()))
    assert found["1.model.layers.0.mlp.gate_up"] == "Fused"
    assert found["1.head"] == "column_gather"


class NormedEmbedding(nn.Embedding):
    def forward(self, ids):
        return nn.functional.normalize(super().forward(ids), dim=-1)


def test_an_embedding_that_computes_more_is_left_whole():
    model = Whole(plan=PLAN | {"words": "embedding_rowwise"})
    assert styles(model)["model.words"] == "vocab"
    model.model.words = NormedEmbedding(VOCAB, HIDDEN)
    assert styles(model)["model.words"] == "replicate"


def test_a_star_is_a_number_and_nothing_else():
    model = Whole()
    model.model.layers.extra = copy.deepcopy(model.model.layers[0])
    found = styles(model)
    assert found["model.layers.1.mlp.down"] == "row"
    assert {style for name, style in found.items() if "extra" in name} == {""}


def test_a_plan_for_the_head_alone_is_none():
    found = styles(Whole(plan={}))  # as a forward suggests
    assert found["model.layers.1.attention.out"] == "row"
    assert found["model.words"] == "vocab"
    assert styles(Whole(), {"head": "column_gather"})["model.layers.1.mlp.down"] == ""


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"mlp.down": "diagonal"}, r"'model.layers.\*.mlp.down' the style 'diagonal', which is"),
        (
            {"attention.sinks": "rowwise"},
            "'model.layers.0.attention.sinks' the style 'rowwise', wh",
        ),
    ],
)
def test_a_style_that_cannot_be_is_named(change, text):
    model = Whole(plan=PLAN | {f"layers.*.{name}": style for name, style in change.items()})
    for layer in model.model.layers:
        layer.attention.sinks = nn.Parameter(torch.zeros(HEADS))
    with pytest.raises(ValueError, match=text):
        explain(model, 2)


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
        explain(model, 2)


def trained(options):
    torch.manual_seed(0)
    as_one_process(Whole(**options).double())


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
    run_ranks(trained, tp, options)

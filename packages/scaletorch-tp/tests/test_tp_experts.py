"""Stacked weights of experts cut along the width inside of each: numbers, state, refusals."""

import pytest
import torch
from llamas import compare
from torch import nn
from torch.distributed import get_rank, group

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.tensor_parallel import (
    Slices,
    Stacked,
    apply_tensor_parallel,
    explain,
    gather_state_dict,
    load_full_state_dict,
    split_by_owner,
)
from scaletorch.parallel.tensor_parallel.building import find_cuts

HIDDEN, WIDTH, EXPERTS, VOCAB = 6, 5, 3, 11
STYLE = Stacked(
    {"gate_up_proj": Slices(1, packed=2), "gate_up_bias": Slices(1, packed=2), "down_proj": 2},
    ("down_bias",),
)
PLAN = {
    "embed": "vocab", "block.experts": STYLE, "head": "column_gather", "block": "sequence_layer",
}  # fmt: skip


class Experts(nn.Module):
    def __init__(self, bias=True, is_concatenated=True):
        super().__init__()
        self.intermediate_dim, self.is_concatenated = WIDTH, is_concatenated
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, HIDDEN))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.gate_up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH)) if bias else None
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN)) if bias else None

    def forward(self, hidden, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden)
        for expert in range(EXPERTS):
            token, slot = torch.where(top_k_index == expert)
            biases = (None if b is None else b[expert] for b in (self.gate_up_bias, self.down_bias))
            first, second = biases
            rows = nn.functional.linear(hidden[token], self.gate_up_proj[expert], first)
            if self.is_concatenated:
                gate, up = rows.split(self.intermediate_dim, -1)
            else:
                gate, up = rows[:, ::2], rows[:, 1::2]
            rows = nn.functional.linear(gate.sigmoid() * up, self.down_proj[expert], second)
            out.index_add_(0, token, rows * top_k_weights[token, slot, None])
        return out


class Block(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS), experts

    def forward(self, hidden):
        rows = hidden.flatten(0, 1)
        weights, index = self.router(rows).softmax(-1).topk(2)
        return hidden + self.experts(rows, index, top_k_weights=weights).view_as(hidden)


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCAB, HIDDEN), block
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids):
        return self.head(self.block(self.embed(ids)))


def build(**options):
    torch.manual_seed(0)
    return Model(Block(Experts(**options))).double()


IDS = torch.randint(VOCAB, (3, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@distributed_test(world_size=2)
def test_as_one_process(sequence_parallel):
    model = apply_tensor_parallel(build(), PLAN, group.WORLD, sequence_parallel=sequence_parallel)
    experts = model.block.experts
    assert type(experts).__name__ == "ParallelExperts" + Experts.__name__
    assert isinstance(experts, Experts)
    assert experts.intermediate_dim == (3, 2)[get_rank()]
    assert experts.gate_up_proj.shape == (EXPERTS, 2 * experts.intermediate_dim, HIDDEN)
    compare(build(), model, IDS)


# Styles of experts' parameters, their module and their router, as versions of transformers have.
OLD = {"gate_up_proj": "local_rowwise", "down_proj": "local_rowwise"}
NEW = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
PLAIN = {"gate_up_proj": "colwise", "down_proj": "rowwise"}
COLUMNS = OLD | {"gate_up_proj": "local_colwise"}
VERSIONS = {
    "5.0": (OLD, {"block.experts": "gather", "block.router": "ep_router"}),
    "5.0, cut along columns": (COLUMNS, {"block.experts": "gather", "block.router": "colwise_rep"}),
    "5.1": (NEW, {"block.experts": "moe_tp_experts", "block.router": "ep_router"}),
    "5.17": (NEW, {"block.experts": "moe_tp_experts"}),
    "two in one weight that is not said to be packed": (PLAIN, {"block.experts": "moe_tp_experts"}),
}


@pytest.mark.parametrize("is_concatenated", [True, False])
@pytest.mark.parametrize("version", VERSIONS)
@distributed_test(world_size=2)
def test_plans_of_transformers_train_as_one_process(version, is_concatenated):
    model = build(bias=False, is_concatenated=is_concatenated)
    own, others = VERSIONS[version]
    model._tp_plan = others | {f"block.experts.{name}": style for name, style in own.items()}
    model = apply_tensor_parallel(model, None, group.WORLD)
    assert model.block.experts.gate_up_proj.shape[1] == (6, 4)[get_rank()]
    compare(build(bias=False, is_concatenated=is_concatenated), model, IDS)


class InTurn(nn.Module):
    """Its experts are called with the tokens of one after another's, as in Llama 4."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS), Batched()

    def forward(self, hidden):
        rows = hidden.flatten(0, 1)
        scores = self.router(rows).sigmoid().T.reshape(-1, 1)
        found = self.experts(rows.repeat(EXPERTS, 1) * scores).view(EXPERTS, *hidden.shape)
        return hidden + found.sum(0)


class Batched(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))

    def forward(self, hidden):
        gate, up = torch.bmm(hidden.view(EXPERTS, -1, HIDDEN), self.gate_up).chunk(2, -1)
        return torch.bmm(gate.sigmoid() * up, self.down).view(-1, HIDDEN)


def in_turn():
    torch.manual_seed(0)
    return Model(InTurn()).double()


@distributed_test(world_size=2)
def test_tokens_of_one_expert_after_another():
    plan = {**PLAN, "block.experts": Stacked({"gate_up": Slices(2, packed=2), "down": 1})}
    shares = apply_tensor_parallel(in_turn(), plan, group.WORLD, sequence_parallel=True)
    with pytest.raises(InvalidArgumentError, match=r"Batched must be called with rows, a token"):
        compare(in_turn(), shares, IDS)
    compare(in_turn(), apply_tensor_parallel(in_turn(), plan, group.WORLD), IDS)


@distributed_test(world_size=2)
def test_a_plan_of_transformers_for_transposed_weights():
    model = in_turn()
    styles = {"": "moe_tp_experts", ".gate_up": "packed_rowwise", ".down": "colwise"}
    model._tp_plan = {f"block.experts{name}": style for name, style in styles.items()}
    model = apply_tensor_parallel(model, None, group.WORLD)
    assert model.block.experts.gate_up.shape[2] == (6, 4)[get_rank()]
    compare(in_turn(), model, IDS)


@distributed_test(world_size=2)
def test_state():
    model = apply_tensor_parallel(build(), PLAN, group.WORLD)
    other = {name: value + 1 for name, value in build().state_dict().items()}
    load_full_state_dict(model, other)
    for name, whole in gather_state_dict(model).items():
        assert whole.equal(other[name]), name
    both = (range(0, 3), range(5, 8)), (range(3, 5), range(8, 10))
    assert find_cuts(model)["block.experts.gate_up_proj"].cut.ranges == both
    pieces = split_by_owner(model, {name: p.detach() for name, p in model.named_parameters()})
    assert [owner for owner, _ in pieces["block.experts.gate_up_proj"]] == [get_rank()] * 2
    assert [owner for owner, _ in pieces["block.experts.down_bias"]] == [0]


def test_explained():
    told = explain(build(), 2, PLAN)
    local = {p.name: p.local_shapes for p in told.parameters}
    assert local["block.experts.gate_up_proj"] == ((EXPERTS, 6, HIDDEN), (EXPERTS, 4, HIDDEN))
    assert local["block.experts.down_bias"] == ((EXPERTS, HIDDEN),) * 2
    assert "Stacked" in str(told)


ALL = ("gate_up_proj", "gate_up_bias", "down_proj")
REFUSED = [
    ({"gate_up_proj": 1, "other": 2}, (), 2, "has no parameter other"),
    ({"gate_up_proj": Slices(1, packed=2)}, (), 2, "down_proj, gate_up_bias, down_bias would work"),
    (dict.fromkeys(ALL, 1), ("down_bias",), 2, "widths"),
    ({"gate_up_proj": Slices(1, packed=4)}, ("down_bias",), 2, "is neither sharded nor added"),
    (STYLE.sharded, STYLE.added, 6, r"block.experts.width = 5"),
]


@pytest.mark.parametrize(("sharded", "added", "tp", "text"), REFUSED)
def test_styles_that_do_not_fit_are_refused(sharded, added, tp, text):
    with pytest.raises(ValueError, match=text):
        explain(build(), tp, PLAN | {"block.experts": Stacked(sharded, added)})


def test_styles_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="dim of each behind that of the experts"):
        Stacked({"up": 0})
    with pytest.raises(ValueError, match="a unit of at least 1"):
        Stacked({"up": Slices(1, packed=0)})
    with pytest.raises(ValueError, match="names of parameters"):
        Stacked({})


@pytest.mark.parametrize(
    ("styles", "text"),
    [
        ({".down_proj": "odd"}, "'block.experts.down_proj' the style 'odd'"),
        ({}, "none of their parameters"),
        ({"": "moe_identity_expert"}, "'moe_identity_expert', which is none of"),
    ],
)
def test_plans_of_transformers_that_do_not_fit_are_refused(styles, text):
    model = build(bias=False)
    plan = {"block.experts": "moe_tp_experts"} | {f"block.experts{n}": s for n, s in styles.items()}
    model._tp_plan = plan
    with pytest.raises(InvalidArgumentError, match=text):
        explain(model, 2)


def test_a_plan_that_gives_ranks_whole_experts_is_none_of_tensor_parallelism():
    model = build(bias=False)
    model._tp_plan = {f"block.experts.{name}": "grouped_gemm" for name in PLAIN}
    model._tp_plan |= {"block.experts": "gather", "head": "colwise_rep"}
    with pytest.raises(InvalidArgumentError, match="has no plan of its own for its layers"):
        explain(model, 2)

"""Stacked weights of experts cut along the width inside of each: numbers, state, refusals."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed import group

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import distributed_test, relative_error
from scaletorch.parallel.tensor_parallel import (
    Slices,
    Stacked,
    apply_tensor_parallel,
    explain,
    gather_state_dict,
    gather_tensors,
    load_full_state_dict,
    shard_dims,
    split_by_owner,
)
from scaletorch.parallel.tensor_parallel.building import find_cuts
from scaletorch.parallel.tensor_parallel.plans.own_plans import stacked_of

HIDDEN, WIDTH, EXPERTS, VOCAB = 6, 5, 3, 11
STYLE = Stacked(
    {"gate_up": Slices(1, packed=2), "gate_up_bias": Slices(1, packed=2), "down": 2}, ("down_bias",)
)
PLAN = {"embed": "vocab", "block.experts": STYLE, "head": "column_gather"}


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.intermediate_dim = WIDTH
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, HIDDEN))
        self.gate_up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, hidden, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden)
        for expert in range(EXPERTS):
            token, slot = torch.where(top_k_index == expert)
            rows = nn.functional.linear(
                hidden[token], self.gate_up[expert], self.gate_up_bias[expert]
            )
            inner = (rows[:, : self.intermediate_dim].sigmoid()) * rows[:, self.intermediate_dim :]
            rows = nn.functional.linear(inner, self.down[expert], self.down_bias[expert])
            out.index_add_(0, token, rows * top_k_weights[token, slot, None])
        return out


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = Experts()

    def forward(self, hidden):
        rows = hidden.flatten(0, 1)
        weights, index = self.router(rows).softmax(-1).topk(2)
        return hidden + self.experts(rows, index, top_k_weights=weights).view_as(hidden)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.block = Block()
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids):
        return self.head(self.block(self.embed(ids)))


def build():
    torch.manual_seed(0)
    return Model().double()


def step(model):
    ids = torch.randint(VOCAB, (3, 7), generator=torch.Generator().manual_seed(1))
    logits = model(ids)
    nn.functional.cross_entropy(logits.flatten(0, 1), ids.flip(1).flatten()).backward()
    return logits, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@distributed_test(world_size=2)
def test_as_one_process(sequence_parallel):
    logits, expected = step(build())
    model = apply_tensor_parallel(build(), PLAN, group.WORLD, sequence_parallel=sequence_parallel)
    experts = model.block.experts
    assert type(experts).__name__ == "ParallelExperts" + Experts.__name__
    assert isinstance(experts, Experts)
    assert experts.intermediate_dim == (3, 2)[experts.tp_rank]
    assert experts.gate_up.shape == (EXPERTS, 2 * experts.intermediate_dim, HIDDEN)
    for each in (copy.deepcopy(model), model):
        found, gradients = step(each)
        assert relative_error(found, logits) < 1e-13
        for name, whole in gather_tensors(each, gradients).items():
            assert relative_error(whole, expected[name]) < 1e-12, name


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
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))

    def forward(self, hidden):
        rows = hidden.view(EXPERTS, -1, HIDDEN)
        return torch.bmm(torch.bmm(rows, self.up).sigmoid(), self.down).view(-1, HIDDEN)


def in_turn():
    model = build()
    model.block = InTurn().double()
    return model


@distributed_test(world_size=2)
def test_tokens_of_one_expert_after_another():
    logits, expected = step(in_turn())
    plan = {**PLAN, "block.experts": Stacked({"up": 2, "down": 1})}
    shares = apply_tensor_parallel(in_turn(), plan, group.WORLD, sequence_parallel=True)
    with pytest.raises(InvalidArgumentError, match=r"Batched must be called with rows, a token"):
        step(shares)
    model = apply_tensor_parallel(in_turn(), plan, group.WORLD)
    found, gradients = step(model)
    assert relative_error(found, logits) < 1e-13
    for name, whole in gather_tensors(model, gradients).items():
        assert relative_error(whole, expected[name]) < 1e-12, name


@distributed_test(world_size=2)
def test_state():
    plain = build()
    model = apply_tensor_parallel(build(), PLAN, group.WORLD)
    for name, whole in gather_state_dict(model).items():
        assert whole.equal(plain.state_dict()[name]), name
    other = {name: value + 1 for name, value in plain.state_dict().items()}
    load_full_state_dict(model, other)
    for name, whole in gather_state_dict(model).items():
        assert whole.equal(other[name]), name
    dims = shard_dims(model)
    assert (dims["block.experts.gate_up"], dims["block.experts.down"]) == (1, 2)
    assert dims["block.experts.down_bias"] is None
    both = (range(0, 3), range(5, 8)), (range(3, 5), range(8, 10))
    assert find_cuts(model)["block.experts.gate_up"].cut.ranges == both
    values = {name: p.detach() for name, p in model.named_parameters()}
    pieces = split_by_owner(model, values)
    rank = model.block.experts.tp_rank
    assert [owner for owner, _ in pieces["block.experts.gate_up"]] == [rank, rank]
    assert [owner for owner, _ in pieces["block.experts.down_bias"]] == [0]


def test_explained():
    told = explain(build(), 2, PLAN)
    local = {p.name: p.local_shapes for p in told.parameters}
    assert local["block.experts.gate_up"] == ((EXPERTS, 6, HIDDEN), (EXPERTS, 4, HIDDEN))
    assert local["block.experts.down_bias"] == ((EXPERTS, HIDDEN),) * 2
    assert "stacked experts" in str(told)


def test_refusals():
    for style, text in (
        (Stacked({"gate_up": 1, "other": 2}), "has no parameter other"),
        (Stacked({"gate_up": Slices(1, packed=2)}), "gate_up_bias, down, down_bias would work"),
        (Stacked({n: 1 for n in ("gate_up", "gate_up_bias", "down")}, ("down_bias",)), "widths"),
        (Stacked({"gate_up": Slices(1, packed=4)}, STYLE.added), "is neither sharded nor added"),
    ):
        with pytest.raises(ValueError, match=text):
            explain(build(), 2, PLAN | {"block.experts": style})
    with pytest.raises(ValueError, match=r"block.experts.width = 5"):
        explain(build(), 6, PLAN)
    with pytest.raises(ValueError, match="dim behind that of the experts"):
        Slices(0)
    with pytest.raises(ValueError, match="names of parameters"):
        Stacked({})


def test_plans_of_transformers():
    parameters = dict.fromkeys(("up", "down"))
    turns = SimpleNamespace(_parameters=parameters, is_concatenated=False)
    found = stacked_of("experts", turns, {"up": "packed_rowwise", "down": "colwise"})
    assert found.sharded == {"up": Slices(2, unit=2), "down": Slices(1)}
    plain = SimpleNamespace(_parameters=parameters)
    found = stacked_of("experts", plain, {"up": "packed_colwise", "down": "rowwise"})
    assert found.sharded["up"] == Slices(1, packed=2)
    with pytest.raises(ValueError, match=r"'experts.up' the style 'odd'"):
        stacked_of("experts", plain, {"up": "odd"})
    with pytest.raises(ValueError, match="none of their parameters"):
        stacked_of("experts", plain, {})

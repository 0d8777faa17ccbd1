"""Pipelines over layers with and without experts: what they cost, and where the model is cut."""

import pytest
import torch
from torch import nn

from scaletorch import compose
from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.models import Mixture, MixtureConfig
from scaletorch.parallel.pg_manager import setup_process_group_manager
from scaletorch.parallel.pipeline_parallel import Split, distribute_layers

CONFIG = MixtureConfig(
    vocab_size=16, hidden_size=8, intermediate_size=12, num_layers=3, num_heads=2, num_kv_heads=2,
    num_experts=8,
)  # fmt: skip
PLAN = {"layers.*.experts": "experts"}
WIDTH, VOCABULARY = 16, 8


def test_a_token_meets_its_own_experts_alone():
    model = Mixture(CONFIG)
    counts = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
    experts = sum(p.numel() for p in model.layers[0].mlp.experts.parameters())
    each = counts[0] - experts + experts * 2 / 8
    head = sum(p.numel() for part in (model.norm, model.lm_head) for p in part.parameters())
    assert compose.active_costs(model) == (0, each, each, each, head)
    assert compose.active_costs(model, top_k=8)[1] == counts[0]
    model.layers[0].mlp = nn.Linear(8, 60)  # a dense layer first, as wide as it likes
    dense, *others = compose.active_costs(model)[1:4]
    assert dense == counts[0] - experts - 64 + 540  # a router has 64
    assert others == [each, each]


class Routed(nn.Module):
    """Three experts: two ranks have two of them and one."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 3, bias=False)
        self.experts = Experts()

    def forward(self, x):
        weights, index = self.router(x.flatten(0, 1)).softmax(-1).topk(2)
        return x + self.experts(x.flatten(0, 1), index, weights).view_as(x)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, hidden, index, weights):
        result = torch.zeros_like(hidden)
        for number in range(len(self.weight)):
            chosen = ((index == number) * weights).sum(1, keepdim=True)
            states = (hidden @ self.weight[number] + self.bias[number]).tanh()
            result = result + states * chosen
        return result


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Mixed(nn.Module):
    """By its own experts, one rank would cut behind two layers, the other behind the first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Dense(), Routed(), Routed()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.double()

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch():
    tokens = torch.randint(VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(5))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}


def train(costs):
    plain = Mixed()
    whole = batch()
    expected = nn.functional.cross_entropy(
        plain(whole["input_ids"]).flatten(0, 1), whole["labels"].flatten()
    )
    expected.backward()
    manager = setup_process_group_manager(dp_size=2, pp_size=2, ep_size=2)
    model = compose.parallelize(
        Mixed(), manager, plan=PLAN, split=Split(costs=costs), rehearse=False
    )
    loss = compose.train_step(model, compose.shard_global_batch(whole, 2, model=model))
    assert relative_error(loss, expected.detach()) < 1e-12
    found = compose.full_gradients(model)
    for name, parameter in plain.named_parameters():
        assert relative_error(found[name], parameter.grad) < 1e-11, name
    return sorted({n.split(".")[1] for n, _ in model.named_parameters() if n[:6] == "layers"})


def test_ranks_with_unequal_shares_of_experts_cut_at_one_place():
    stages = run_ranks(train, 4, "parameters")
    assert stages == [["0", "1"], ["2"]] * 2


def test_a_model_is_cut_by_what_tokens_meet():
    model = Mixed()
    costs = compose.active_costs(model, plan=PLAN, top_k=2)
    assert costs == (0, 478, 48 + 544, 48 + 544, 128)
    assert distribute_layers(3, 2, costs) == [range(2), range(2, 3)]
    assert compose.active_costs(model, plan=PLAN, top_k=1) == (0, 478, 320, 320, 128)
    assert run_ranks(train, 4, costs)


def test_what_cannot_be_counted():
    with pytest.raises(
        InvalidArgumentError, match=r"'layers.1.experts' is not to be seen .*top_k="
    ):
        compose.active_costs(Mixed(), plan=PLAN)
    with pytest.raises(
        InvalidArgumentError, match=r"brings no plan .* and calls no module experts"
    ):
        compose.active_costs(nn.Sequential(nn.Linear(2, 2)))

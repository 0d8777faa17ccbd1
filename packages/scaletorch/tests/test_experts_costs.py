"""Pipelines over layers with and without experts: where the model is cut."""

import torch
from torch import nn
from training import in_one_process, on_a_layout, require_alike

from scaletorch import compose
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.parallel.pipeline_parallel import Split

PLAN = {"layers.*.experts": "experts"}
WIDTH, VOCABULARY = 16, 8


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


def stages():
    """Train; return the layers that this rank has."""
    sizes, options = {"dp_size": 2, "pp_size": 2, "ep_size": 2}, {"plan": PLAN}
    options |= {"split": Split(costs="parameters")}
    found = on_a_layout(Mixed, sizes, [batch()], options=options, micro_batches=2)
    require_alike(found, in_one_process(Mixed(), [batch()]), losses=1e-12)
    manager = setup_process_group_manager(**sizes)
    model = compose.parallelize(Mixed(), manager, **options, rehearse=False)
    destroy_process_group_manager()
    return sorted({n.split(".")[1] for n, _ in model.named_parameters() if n[:6] == "layers"})


def test_ranks_with_unequal_shares_of_experts_cut_at_one_place():
    assert run_ranks(stages, 4) == [["0", "1"], ["2"]] * 2

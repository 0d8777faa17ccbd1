"""Experts of one's own in stacks: where a pipeline is cut, and experts that need one another."""

from functools import partial

import pytest
import torch
from torch import nn
from training import in_one_process, on_a_layout, require_alike

from scaletorch import compose
from scaletorch.dist import get_rank
from scaletorch.dist.errors import RehearsalError
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.parallel.pipeline_parallel import Split

WIDTH, VOCABULARY, EXPERTS = 16, 8, 3  # two ranks have two experts and one


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def one(self, rows, expert):
        return (rows @ self.weight[expert] + self.bias[expert]).tanh()

    def forward(self, hidden, index, weights):
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, slot = torch.where(index == expert)
            rows = self.one(hidden[token], expert) * weights[token, slot, None]
            out = out.index_add(0, token, rows)
        return out


class Normalising(Experts):
    def forward(self, hidden, index, weights):
        return super().forward(hidden, index, weights / weights.sum(-1, keepdim=True))


class Columns(Experts):
    """Weights of single experts lie in columns, which stay whole and are numbered anew."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH, EXPERTS))

    def one(self, rows, expert):
        return super().one(rows, expert) * self.scale[:, expert]


class Routed(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), kind()

    def forward(self, x):
        weights, index = self.router(x.flatten(0, 1)).softmax(-1).topk(2)
        return x + self.experts(x.flatten(0, 1), index, weights).view_as(x)


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Model(nn.Module):
    """By its own experts, one rank would cut behind two layers, the other behind the first."""

    def __init__(self, kind=Experts):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Dense(), Routed(kind), Routed(kind)])
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


@distributed_test(world_size=4)
def test_ranks_with_unequal_shares_of_experts_cut_at_one_place():
    sizes = {"dp_size": 2, "pp_size": 2, "ep_size": 2}
    options = {"split": Split(costs="parameters")}
    found = on_a_layout(Model, sizes, [batch()], options=options, micro_batches=2)
    require_alike(found, in_one_process(Model(), [batch()]), losses=1e-12)
    manager = setup_process_group_manager(**sizes)
    model = compose.parallelize(Model(), manager, **options, rehearse=False)
    destroy_process_group_manager()
    layers = {n.split(".")[1] for n, _ in model.named_parameters() if n[:6] == "layers"}
    assert layers == ({"0", "1"}, {"2"})[get_rank() % 2]


@distributed_test(world_size=2)
def test_experts_that_need_one_another_are_refused():
    train = partial(on_a_layout, sizes={"dp_size": 2, "ep_size": 2}, batches=[batch()])
    train(Model, rehearse=True)
    for kind in (Normalising, Columns):
        with pytest.raises(RehearsalError, match=r"output of layers\.1 is off"):
            train(partial(Model, kind), rehearse=True)

"""Experts that need one another are refused by the rehearsal of the first step."""

import pytest
import torch
from torch import nn

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist.errors import RehearsalError
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

HIDDEN, EXPERTS = 8, 4


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 6))
        self.down = nn.Parameter(torch.randn(EXPERTS, 6, HIDDEN))

    def one(self, rows, expert):
        return torch.tanh(rows @ self.up[expert]) @ self.down[expert]

    def forward(self, hidden, index, weights):
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, slot = torch.where(index == expert)
            rows = self.one(hidden[token], expert) * weights[token, slot, None]
            out = out.index_add(0, token, rows)
        return out


class Normalising(Stacked):
    def forward(self, hidden, index, weights):
        return super().forward(hidden, index, weights / weights.sum(-1, keepdim=True))


class Columns(Stacked):
    """Weights of single experts lie in columns, which stay whole and are numbered anew."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(HIDDEN, EXPERTS))

    def one(self, rows, expert):
        return super().one(rows, expert) * self.scale[:, expert]


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.gate, self.experts = nn.Linear(HIDDEN, EXPERTS), kind()

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, index = self.gate(tokens).softmax(-1).topk(2)
        return x + self.experts(tokens, index, weights).view_as(x)


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, HIDDEN), nn.Linear(HIDDEN, 16)
        self.layers = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _train(kind):
    torch.manual_seed(0)
    manager = setup_process_group_manager(dp_size=2, ep_size=2)
    try:
        model = parallelize(Model(kind).double(), manager)
        ids = torch.randint(0, 16, (4, 9))
        batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()}
        train_step(model, shard_global_batch(batch, 1, model=model))
    finally:
        destroy_process_group_manager()


@distributed_test(world_size=2)
def test_experts_that_are_not_apart_are_refused():
    _train(Stacked)
    for kind in (Normalising, Columns):
        with pytest.raises(RehearsalError, match=r"output of layers\.0 is off"):
            _train(kind)

"""The plan to complete that a model without one is given: its names, its order, its styles."""

import ast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import group

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.tensor_parallel import apply_tensor_parallel, explain


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 12) for _ in range(3))
        self.out = nn.Linear(12, 8)


class Block(nn.Module):
    """Its children are registered in another order than it calls them."""

    def __init__(self, inner=24):
        super().__init__()
        self.down, self.up, self.gate = (
            nn.Linear(inner, 8),
            nn.Linear(8, inner),
            nn.Linear(8, inner),
        )
        self.norm, self.attn = nn.LayerNorm(8), SelfAttention()
        self.mixer = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        h = self.norm(self.mixer(x, x, x)[0] + self.attn(x))
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(32, 8)
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([Block(), Block(), Block(20)])
        self.last = nn.Linear(16, 8)

    def forward(self, x):
        return self.last(self.first(x))


def plan_of(model):
    return ast.literal_eval(str(explain(model, 2)))


def test_names_shapes_and_styles():
    text = str(explain(Model(), 2))
    assert text.startswith("# Model has no plan.")
    assert '    # blocks.*\n    "blocks.*.mixer": "attention",  # 2 heads of 4' in text
    assert '    "blocks.2.gate": "column",  # 8 -> 20\n' in text
    assert '    "blocks.*.attn.query": "replicate",  # 8 -> 12?\n' in text
    for block in range(3):  # no pattern, as their shapes differ; in the order of calls
        names = [f'"blocks.{block}.{own}"' for own in ("gate", "up", "down")]
        places = [text.index(name) for name in names]
        assert places == sorted(places)
    assert all(len(line) <= 100 for line in text.splitlines())


def test_it_is_a_plan():
    plan = plan_of(Model())
    assert [plan[f"blocks.1.{own}"] for own in ("gate", "up", "down")] == [
        "column",
        "column",
        "row",
    ]
    assert {plan[f"blocks.*.attn.{n}"] for n in ("query", "key", "value", "out")} == {"replicate"}
    told = explain(Model(), 2, plan)
    assert not told.skeleton
    assert {p.name: p.local_shapes[0] for p in told.parameters}["blocks.2.up.weight"] == (10, 8)


class Between(nn.Module):
    """What its layers lie around has parameters: a root, a norm between them."""

    def __init__(self, between):
        super().__init__()
        self.first, self.between, self.last = nn.Linear(8, 16), between, nn.Linear(16, 8)

    def forward(self, x):
        return self.last(self.between(self.first(x)))


def test_only_layers_one_after_another_are_a_pair():
    assert plan_of(Between(nn.GELU())) == {"first": "column", "last": "row"}
    for between in (nn.LayerNorm(16), nn.Sequential(nn.Conv1d(16, 16, 1))):
        assert set(plan_of(Between(between)).values()) == {"replicate"}


def chain(*between):
    inner = (each for module in between for each in (nn.Linear(8, 8), module))
    return nn.Sequential(*inner, nn.Linear(8, 2))


def test_layers_of_a_sequence_are_pairs():
    pairs = {"0": "column", "2": "row", "4": "column", "6": "row"}
    assert plan_of(chain(nn.ReLU(), nn.Dropout(), nn.SiLU())) == pairs
    assert plan_of(chain(nn.ReLU(), nn.ReLU())) == {"0": "column", "2": "row", "4": "replicate"}
    for between in (nn.Softmax(-1), nn.LayerNorm(8), nn.Flatten()):
        assert plan_of(chain(between)) == {"0": "replicate", "2": "replicate"}


@distributed_test(world_size=2)
def test_a_model_without_a_plan_is_told_how_to_get_one():
    with pytest.raises(InvalidArgumentError, match=r"print\(explain\(model, 2\)\) of"):
        apply_tensor_parallel(Between(nn.GELU()), None, group.WORLD)
    torch.manual_seed(0)
    plain = Between(nn.GELU())
    torch.manual_seed(0)
    model = Between(nn.GELU())
    x = torch.randn(3, 8)
    apply_tensor_parallel(model, plan_of(model), group.WORLD)
    torch.testing.assert_close(model(x), plain(x))

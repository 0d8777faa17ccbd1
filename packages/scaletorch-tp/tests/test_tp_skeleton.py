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
    assert '    "blocks.*.mixer": "attention",  # 2 heads of 4\n' in text
    assert '    "blocks.2.gate": "replicate",  # 8 -> 20\n' in text  # none of the others' shape
    assert '    "blocks.*.attn.query": "replicate",  # 8 -> 12\n' in text
    assert "mixer.out_proj" not in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_it_is_a_plan():
    plan = plan_of(Model())
    assert {plan[f"blocks.*.attn.{n}"] for n in ("query", "key", "value", "out")} == {"replicate"}
    told = explain(Model(), 2, plan | {"blocks.2.up": "column", "blocks.2.down": "row"})
    assert not told.skeleton
    assert {p.name: p.local_shapes[0] for p in told.parameters}["blocks.2.up.weight"] == (10, 8)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.last(F.gelu(self.first(x)))


@distributed_test(world_size=2)
def test_a_model_without_a_plan_is_told_how_to_get_one():
    with pytest.raises(InvalidArgumentError, match=r"print\(explain\(model, 2\)\) writes"):
        apply_tensor_parallel(Pair(), None, group.WORLD)
    torch.manual_seed(0)
    plain = Pair()
    torch.manual_seed(0)
    model = Pair()
    x = torch.randn(3, 8)
    apply_tensor_parallel(model, plan_of(model), group.WORLD)
    torch.testing.assert_close(model(x), plain(x))

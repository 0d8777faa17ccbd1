"""Parameters beside sharded layers, one for each of their features."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.tensor_parallel import (
    PerHead,
    apply_tensor_parallel,
    gather_tensors,
)
from scaletorch.parallel.tensor_parallel.plans.resolve import resolve

HIDDEN, WIDTH = 12, 10


class Attention(nn.Module):
    """Scales every feature of its queries, and of what its heads return."""

    def __init__(self):
        super().__init__()
        self.head_dim = 4
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.of_queries, self.of_heads = (nn.Parameter(torch.randn(HIDDEN)) for _ in range(2))

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (-1, 4)).transpose(1, 2)
            for y in (self.q(x) * self.of_queries, self.k(x), self.v(x))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2) * self.of_heads)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return self.down(F.gelu(self.up(x) * self.scale))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(11, HIDDEN), nn.Linear(HIDDEN, 11)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, ids):
        x = self.words(ids)
        x = x + self.attention(x)
        return self.head(x + self.mlp(x))


PLAN = {
    "words": "vocab",
    "attention": PerHead("of_queries", "of_heads"),
    **{f"attention.{name}": "column" for name in "qkv"},
    "attention.o": "row",
    "mlp": PerHead("scale"),
    "mlp.up": "column",
    "mlp.down": "row",
    "head": "column_gather",
}


def made():
    torch.manual_seed(0)
    return Model().double()


def trained():
    ids = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(1))
    shapes = {}
    for sequence_parallel in (False, True):
        one = made()
        many = apply_tensor_parallel(
            copy.deepcopy(one), PLAN, dist.group.WORLD, sequence_parallel=sequence_parallel
        )
        for model in (one, many):
            model(ids).square().mean().backward()
        torch.testing.assert_close(many(ids), one(ids), rtol=0, atol=1e-12)
        gradients = gather_tensors(many, {n: p.grad for n, p in many.named_parameters()})
        for name, parameter in one.named_parameters():
            difference = (gradients[name] - parameter.grad).abs().max()
            assert difference < 1e-12, (name, difference)
        shapes = {n: tuple(p.shape) for n, p in many.named_parameters()}
    return [shapes[name] for name in ("attention.of_queries", "mlp.scale")]


def test_what_belongs_to_features_is_cut_with_them():
    first, second = run_ranks(trained, 2)
    assert first == [(8,), (5,)]
    assert second == [(4,), (5,)]


def test_features_that_nothing_divides():
    plan = {**PLAN, "mlp.up": "replicate"}
    with pytest.raises(InvalidArgumentError, match=r"of 10 query heads, and .* none were"):
        resolve(made(), plan, 2)

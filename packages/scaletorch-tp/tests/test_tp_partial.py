"""What is trained inside of a region without being a shard: whole gradients, or refused."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from llamas import compare
from torch import nn
from torch.utils.checkpoint import checkpoint

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.tensor_parallel import apply_tensor_parallel, vocab_parallel_cross_entropy

HIDDEN, VOCAB, LENGTH = 8, 20, 6  # a share of the MLP is as wide as hidden states
PLAN = {
    "tokens": "vocab", "head": "column_gather",
    **{f"attention.{name}": "column" for name in "qkv"}, "attention.o": "row",
    "mlp.up": "column", "mlp.down": "row",
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x, bias=None):
        projected = (layer(x) for layer in (self.q, self.k, self.v))
        q, k, v = (each.unflatten(-1, (-1, 2)).transpose(1, 2) for each in projected)
        return self.o(F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)
        self.where = ""

    def forward(self, x, gate):
        before, inside, behind = (gate if at in self.where else 1 for at in "bia")
        y = self.up(x * before).tanh() * inside
        return x + behind * self.down(y)


class Model(nn.Module):
    """With a gate, and a bias of relative positions, made outside of the regions."""

    def __init__(self, where="", bias=False, recompute=None):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.attention, self.mlp = Attention(), Mlp()
        self.gate, self.distances = nn.Linear(1, 1), nn.Embedding(LENGTH, 1)
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.mlp.where, self.bias, self.recompute = where, bias, recompute

    def forward(self, ids):
        x = self.tokens(ids)
        places = torch.arange(LENGTH)
        bias = self.distances((places[:, None] - places).abs())[..., 0] if self.bias else None
        x = x + self.attention(x, bias)
        gate = self.gate(torch.ones(1, dtype=x.dtype))
        if self.recompute is None:
            return self.head(self.mlp(x, gate))
        return self.head(checkpoint(self.mlp, x, gate, use_reentrant=self.recompute))


def made(**options):
    torch.manual_seed(0)
    return Model(**options).double()


def ids():
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def train(one, change=lambda model: model):
    many = change(apply_tensor_parallel(copy.deepcopy(one), PLAN, dist.group.WORLD))
    with torch.set_grad_enabled(one.recompute is True):  # which warns without gradients
        many(ids())  # mostly there is nothing to be seen here
    compare(one, many, ids(), rtol=1e-9)


RIGHT = [
    dict(where="b"),  # before the column-parallel layer
    dict(where="a"),  # behind the row-parallel one
    dict(where="ba"),
    dict(bias=True),
    dict(where="i"),  # between them
    dict(where="b", recompute=True),
    dict(where="i", recompute=False),
    dict(where="i", recompute=True),
]
REFUSED = [dict(where="bi"), dict(where="ia"), dict(where="bi", recompute=False)]


@distributed_test(world_size=2, timeout=200)
def test_what_leaves_before_or_comes_behind_has_whole_gradients():
    for options in RIGHT:
        train(made(**options))
    train(made(where="ba"), copy.deepcopy)


@distributed_test(world_size=2, timeout=200)
def test_a_parameter_inside_and_outside_is_refused_on_every_rank():
    for options in REFUSED:
        words = r"Model uses 'gate.\w+'(, 'gate.\w+')? in a parallel region and outside"
        with pytest.raises(InvalidArgumentError, match=words):
            train(made(**options))


class Scaled(Model):
    def forward(self, ids):
        return self.gate.weight[0, 0] * super().forward(ids)


@distributed_test(world_size=2)
def test_a_scale_of_logits_that_stay_divided():
    """A scale of logits that stay divided for the loss."""
    torch.manual_seed(0)
    one = Scaled().double()
    many = apply_tensor_parallel(copy.deepcopy(one), PLAN, dist.group.WORLD)
    many.head.gather_output = False
    vocab_parallel_cross_entropy(
        many(ids()), ids(), group=dist.group.WORLD, vocab_size=VOCAB
    ).backward()
    F.cross_entropy(one(ids()).flatten(0, 1), ids().flatten()).backward()
    torch.testing.assert_close(many.gate.weight.grad, one.gate.weight.grad, rtol=1e-12, atol=0)


@distributed_test(world_size=2)
def test_a_tensor_that_is_given_counts_too():
    model = apply_tensor_parallel(Mlp(), {"up": "column", "down": "row"}, dist.group.WORLD)
    model.where = "i"
    with pytest.raises(InvalidArgumentError, match="Mlp uses a tensor given to it, which requires"):
        model(torch.ones(2, HIDDEN), torch.ones(1, requires_grad=True))
    model(torch.ones(2, HIDDEN, requires_grad=True), torch.ones(1)).sum().backward()


class Gated(nn.Module):
    """Scales features between two layers by what comes before them, outside of the first."""

    def __init__(self, recompute):
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN, bias=False)  # else its bias would show the fault
        self.up, self.down = (nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.recompute = recompute

    def gated(self, x):
        return self.down(self.up(x) * x.mean(-1, keepdim=True))

    def forward(self, x):
        x = self.first(x)
        if self.recompute is None:
            return self.gated(x)
        return checkpoint(self.gated, x, use_reentrant=self.recompute)


@distributed_test(world_size=4)
@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize("first", ["row_split", "column_gather"])
def test_an_output_used_inside_a_region_is_refused(first, recompute):
    plan = {"first": first, "up": "column", "down": "row"}
    model = apply_tensor_parallel(Gated(recompute), plan, dist.group.WORLD)
    x = torch.ones(2, HIDDEN, requires_grad=bool(recompute))
    with pytest.raises(InvalidArgumentError, match="uses the summed or gathered output of a sha"):
        model(x).sum().backward()
    model.first = nn.Identity()  # a tensor that needs no gradient may be used so
    if not recompute:
        model(torch.ones(2, HIDDEN)).sum().backward()

"""Sequence parallelism gives one process's numbers, for any length, and draws apart."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from llamas import require_same_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.tensor_parallel import (
    Divide,
    apply_tensor_parallel,
    sequence_share,
)

PLAN = {
    "tokens": "vocab",
    "attention": Divide("heads"),
    **{f"attention.{name}": "column" for name in "qkv"},
    "attention.o": "row",
    "up": "column",
    "down": "row",
    "head": "column_gather",
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = 6
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape  # sizes from its input, as many modules take them
        q, k, v = (
            f(x).view(batch, length, self.heads, 2).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class Model(nn.Module):
    """Norms, biases, a positional table on every rank, layers in a block and by themselves."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, 12), nn.Embedding(16, 12)
        self.first, self.attention = nn.LayerNorm(12), Attention()
        self.second, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(12, 20)
        self.recompute = None

    def block(self, x):
        x = x + self.dropout(self.attention(self.first(x)))
        return x + self.down(F.gelu(self.up(self.second(x))))

    def forward(self, input_ids, position_ids):
        x = self.tokens(input_ids) + self.places(position_ids)
        if self.recompute is None:
            x = self.block(x)
        else:
            x = checkpoint(self.block, x, use_reentrant=self.recompute)
        return self.head(x)


def plain(**options):
    torch.manual_seed(0)
    return Model(**options).double()


def batch(length):
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(20, (2, length), generator=generator)
    return ids, torch.arange(length).expand(2, length)


def compare(length, recompute):
    one = plain()
    many = apply_tensor_parallel(plain(), PLAN, dist.group.WORLD, sequence_parallel=True)
    many = copy.deepcopy(many)
    many.recompute = recompute
    ranks = dist.get_world_size()
    assert sequence_share(many, length) in (length // ranks, -(-length // ranks))
    for _ in range(2):  # gradients accumulate
        outs = [model(*batch(length)) for model in (one, many)]
        torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)
        for out in outs:
            out.square().mean().backward()
    require_same_gradients(one, many)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("length", [12, 7])
def test_any_length(world_size, length):
    run_ranks(compare, world_size, length, None)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation(reentrant):
    run_ranks(compare, 2, 9, reentrant)


class Counting(Model):
    """Without positions it counts its tokens, as models of transformers do."""

    def forward(self, input_ids, position_ids=None):
        hidden = self.tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1])[None]
        return self.head(self.block(hidden + self.places(position_ids)))


@distributed_test(world_size=2)
def test_a_model_is_told_the_positions_that_it_would_count():
    torch.manual_seed(0)
    one = Counting().double()
    many = apply_tensor_parallel(copy.deepcopy(one), PLAN, dist.group.WORLD, sequence_parallel=True)
    ids, _ = batch(9)
    for arguments, options in (((ids,), {}), ((), {"input_ids": ids, "position_ids": None})):
        torch.testing.assert_close(many(*arguments, **options), one(ids), rtol=1e-12, atol=1e-12)


class Listed(Model):
    """Reads parameters of a list, and of a layer that it does not call, on shares."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(12))])
        self.read = nn.Linear(12, 12, bias=False)

    def block(self, x):
        return F.linear(super().block(x) * self.scales[0], self.read.weight)


class Called(Model):
    def __init__(self):
        super().__init__()
        self.own_scale = nn.Parameter(torch.randn(12))
        own = self.first.forward
        self.first.forward = lambda x: own(x) * self.own_scale


@distributed_test(world_size=2)
def test_parameters_that_others_read_are_summed_too():
    for kind in (Listed, Called):
        torch.manual_seed(0)
        one = kind().double()
        torch.manual_seed(0)
        many = kind().double()
        apply_tensor_parallel(many, PLAN, dist.group.WORLD, sequence_parallel=True)
        for model in (one, many):
            model(*batch(9)).square().mean().backward()
        require_same_gradients(one, many, rtol=1e-9)


def between(length):
    """Return the shape of hidden states between regions."""
    model = apply_tensor_parallel(plain(), PLAN, dist.group.WORLD, sequence_parallel=True)
    shapes = []
    model.second.register_forward_hook(lambda _m, _i, out: shapes.append(tuple(out.shape)))
    model(*batch(length))
    return shapes[0][1]


def test_hidden_states_are_shares():
    assert run_ranks(between, 3, 7) == [3, 2, 2]


def masks(length):
    model = plain(dropout=0.5)
    apply_tensor_parallel(model, PLAN, dist.group.WORLD, sequence_parallel=True)
    torch.manual_seed(5)
    seen = []
    model.dropout.register_forward_hook(lambda _m, _i, out: seen.append((out == 0).tolist()))
    model(*batch(length))
    model.eval()
    after = torch.rand(1).item()
    return seen[0], after


def test_dropout_differs_on_shares_and_the_common_stream_goes_on():
    (one, after), (other, again) = run_ranks(masks, 2, 8)
    assert one != other
    assert after == again


def too_short():
    model = apply_tensor_parallel(plain(), PLAN, dist.group.WORLD, sequence_parallel=True)
    model(*batch(2))


def test_a_sequence_shorter_than_the_ranks_is_refused_on_all():
    with pytest.raises(Exception, match="a sequence of 2 tokens leaves some of 3 ranks"):
        run_ranks(too_short, 3)


def wrong_share():
    model = apply_tensor_parallel(plain(), PLAN, dist.group.WORLD, sequence_parallel=True)
    model(*batch(8))
    model.up(torch.zeros(2, 3, 12, dtype=torch.float64))


def test_a_share_of_another_length_is_refused():
    with pytest.raises(Exception, match="expected this rank's 4 of 8 tokens, got a tensor"):
        run_ranks(wrong_share, 2)


def test_one_rank_changes_nothing():
    model, same = plain(), plain()
    apply_tensor_parallel(model, PLAN, None, sequence_parallel=True)
    assert type(model) is Model
    assert sequence_share(model, 5) == 5
    assert torch.equal(model(*batch(5)), same(*batch(5)))

"""What mixes tokens sees whole sequences under sequence parallelism."""

import copy
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from llamas import compare
from torch import nn
from torch.utils.checkpoint import checkpoint

from scaletorch.dist.errors import InvalidArgumentError, StateError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.tensor_parallel import apply_tensor_parallel

ATTENTION = {
    **{f"layers.*.attention.{name}": "column" for name in "qkv"},
    "layers.*.attention.o": "row",
}
PLAN = {
    "tokens": "vocab", "head": "column_gather",
    "layers.*.mlp.up": "column", "layers.*.mlp.down": "row",
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = 2
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))
        self.dropout = nn.Dropout(0.0)

    def heads(self, x):
        return x.unflatten(-1, (-1, 2)).transpose(1, 2)

    def attend(self, x, memory, causal=True):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(memory)), self.heads(self.v(memory))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.o(self.dropout(y).transpose(1, 2).flatten(2))

    def forward(self, x):
        return self.attend(x, x)


class Layer(nn.Module):
    def __init__(self, attention=Attention):
        super().__init__()
        self.first, self.attention = nn.LayerNorm(12), attention()
        mlp = {"up": nn.Linear(12, 24), "gelu": nn.GELU(), "down": nn.Linear(24, 12)}
        self.second, self.mlp = nn.LayerNorm(12), nn.Sequential(OrderedDict(mlp))

    def mixed(self, x, positions):
        return self.attention(self.first(x))

    def forward(self, x, positions):
        x = x + self.mixed(x, positions)
        return x + self.mlp(self.second(x))


class Model(nn.Module):
    def __init__(self, *layer):
        super().__init__()
        kind, *arguments = layer or (Layer,)
        self.tokens, self.head = nn.Embedding(20, 12), nn.Linear(12, 20)
        self.layers = nn.ModuleList([kind(*arguments)])

    def forward(self, input_ids):
        positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return self.head(self.layers[0](self.tokens(input_ids), positions))


def made(*layer):
    torch.manual_seed(0)
    return Model(*layer).double()


def ids(length=8, rows=2):
    return torch.randint(20, (rows, length), generator=torch.Generator().manual_seed(length))


def train(one, plan, length=8, rows=2):
    many = copy.deepcopy(one)
    apply_tensor_parallel(many, plan, dist.group.WORLD, sequence_parallel=True)
    compare(one, many, ids(length, rows))


class Normed(Attention):
    """With a norm over all heads, as OLMo-2 has it: its layers are no region."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)

    def attend(self, x, memory, causal=True):
        batch, length, _ = x.shape
        q = self.norm(self.q(x)).view(batch, length, 6, 2).transpose(1, 2)
        k, v = self.heads(self.k(memory)), self.heads(self.v(memory))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class Tupled(Attention):
    def forward(self, x):
        return super().forward(x), None


class TupledLayer(Layer):
    def mixed(self, x, positions):
        return super().mixed(x, positions)[0]


def left_whole():
    gathered = {
        name: {"column": "column_gather"}.get(s, "row_split") for name, s in ATTENTION.items()
    }
    for one, plan in (
        (made(), PLAN),
        (made(TupledLayer, Tupled), PLAN),
        (made(Layer, Normed), {**PLAN, **gathered}),
    ):
        for length in (8, 7):
            train(copy.deepcopy(one), plan, length)
    many = apply_tensor_parallel(made(), PLAN, dist.group.WORLD, sequence_parallel=True)
    layer = many.layers[0]
    attention = layer.attention
    attention.dropout.p = 0.5  # draws of what is whole agree, and the others go on apart
    seen, dropped = [], []
    attention.dropout.register_forward_hook(lambda _m, _i, y: dropped.append(y.tolist()))
    attention.register_forward_hook(lambda _m, _i, _o: seen.append(torch.rand(1).item()))
    torch.manual_seed(3)
    many(ids())
    after = torch.rand(1).item()
    layer.mixed = lambda *given: checkpoint(Layer.mixed, layer, *given, use_reentrant=False)
    with pytest.raises(StateError, match=r"Attention sees whole sequences.*and draws.*to 0, or do"):
        many(ids()).sum().backward()
    attention.dropout.p = 0.0
    many(ids()).sum().backward()
    return dropped[0], seen[0], after


def test_attention_that_the_plan_leaves_whole():
    (whole, one, after), (same, other, again) = run_ranks(left_whole, 2)
    assert whole == same
    assert one != other
    assert after == again


class TwoSequences(Attention):
    def forward(self, x, memory):
        return self.attend(x, memory, causal=False)


class CrossLayer(Layer):
    def __init__(self, kind):
        super().__init__(TwoSequences)
        self.kind = kind
        self.memory, self.features = nn.Embedding(20, 12), nn.Linear(12, 12)

    def mixed(self, x, positions):
        ones = torch.ones(2, 6, 12, dtype=x.dtype)
        memory = self.memory(ids()) if self.kind == "ids" else self.features(ones)
        return self.attention(self.first(x), memory)


class Ordered(Attention):
    """Takes positions before the hidden states."""

    def forward(self, positions, x):
        assert positions.shape[-1] == x.shape[-2]
        return super().forward(x)


class OrderedLayer(Layer):
    def mixed(self, x, positions):
        return self.attention(positions, self.first(x))


class ByName(Layer):
    def mixed(self, x, positions):
        return self.attention(positions=positions, x=self.first(x))


class NoSequence(Layer):
    def mixed(self, x, positions):
        return self.attention(positions, positions)


SHARDED = {**PLAN, **ATTENTION}


@distributed_test(world_size=2)
def test_a_region_finds_its_hidden_states():
    for kind in (OrderedLayer, ByName):
        for rows, length in ((2, 4), (4, 8), (3, 7)):
            train(made(kind, Ordered), SHARDED, length, rows)


class Residual(Attention):
    def forward(self, x):
        return x + super().forward(x)


class Whole(Attention):
    def heads(self, x):
        return x.view(*x.shape[:2], 6, 2).transpose(1, 2)


class Pooled(Attention):
    def forward(self, x):
        return super().forward(x).mean(1, keepdim=True)


class Longer(Layer):
    def mixed(self, x, positions):
        return super().mixed(torch.cat([x, x.new_zeros(2, 1, 12)], 1), positions)


class Partly(Attention):
    def forward(self, x):
        return checkpoint(self.attend, x, x, use_reentrant=False)


class Reshaping(Layer):
    def mixed(self, x, positions):
        return super().mixed(x, positions).view(2, 8, 12)


TWO = r"TwoSequences was called with two sequences, of shapes \(2, 4, 12\) and \(2, "
REFUSED = [  # a layer and its arguments, a plan, and what is said
    ((CrossLayer, "ids"), SHARDED, TWO),
    ((CrossLayer, "features"), SHARDED, TWO),
    ((CrossLayer, "ids"), PLAN, TWO),  # attention left whole, too
    ((NoSequence, Ordered), SHARDED, r"a floating tensor \[..., tokens, 12\], and got"),
    ((Layer, Residual), SHARDED,
     r"in Residual does not fit this rank's share of the tokens \(4 of 8\)"),
    ((Layer, Whole), SHARDED, "in Whole does not fit .* of their features"),
    ((Layer, Pooled), PLAN, r"Pooled must return hidden states \[..., 8, H\], and .* \(2, 1, 12\)"),
    ((Longer,), SHARDED, "tokens were added or dropped .* style a module .* 'sequence_who"),
    ((Reshaping,), SHARDED, "in Model does not fit .* 'sequence_whole', or .* 'sequence_layer'"),
    ((Layer, Partly), SHARDED, "checkpoint the whole module"),
]  # fmt: skip


@distributed_test(world_size=2)
def test_what_does_not_fit_shares_is_refused_with_where_it_comes_from():
    for arguments, plan, words in REFUSED:
        many = made(*arguments)
        apply_tensor_parallel(many, plan, dist.group.WORLD, sequence_parallel=True)
        with pytest.raises(InvalidArgumentError, match=words):
            many(ids()).square().mean().backward()

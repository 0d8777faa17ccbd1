"""Sequence parallelism: from the first to the last layer each rank has a share of every sequence.

`test_tp_model.py` trains whole models on shares of unequal lengths.
"""

import copy
from collections import namedtuple
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from llamas import Llama, compare, make
from torch import nn
from torch.utils.checkpoint import checkpoint

from scaletorch.dist.building import tensors_in
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.placement import shard_sizes
from scaletorch.parallel.tensor_parallel import apply_tensor_parallel, explain


def ids(length=8):
    return torch.randint(11, (3, length), generator=torch.Generator().manual_seed(length))


def divided(model, plan=None):
    return apply_tensor_parallel(model, plan, dist.group.WORLD, sequence_parallel=True)


class Counting(Llama):
    """Without positions it counts its tokens, as models of transformers do."""

    def __init__(self, hidden=10, **options):
        super().__init__(hidden=hidden, **options)
        self.places = nn.Embedding(16, hidden)

    def forward(self, input_ids, position_ids=None):
        x = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(x.shape[1])[None]
        x = x + self.places(position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


@distributed_test(world_size=2)
def test_a_model_counts_the_positions_of_whole_sequences():
    one, many = make(Counting), divided(make(Counting))
    for arguments in ((ids(9),), (ids(9), torch.arange(9).expand(3, 9))):
        torch.testing.assert_close(many(*arguments), one(ids(9)), rtol=1e-12, atol=1e-12)


@distributed_test(world_size=3)
def test_hidden_states_are_shares():
    model, lengths = divided(make()), []
    norm = model.layers[1].input_layernorm
    norm.register_forward_hook(lambda _m, _i, out: lengths.append(out.shape[1]))
    for length in (12, 7):
        model(ids(length))
        assert shard_sizes(length, 3)[dist.get_rank()] == lengths[-1]
    assert lengths == [4, (3, 2, 2)[dist.get_rank()]]
    with pytest.raises(InvalidArgumentError, match=r"expected this rank's [23] of 7 tokens, got"):
        model.layers[0].mlp(torch.zeros(2, 4, 10, dtype=torch.float64))
    with pytest.raises(InvalidArgumentError, match="a sequence of 2 tokens leaves some of 3 ranks"):
        model(ids(2))


def test_one_rank_changes_nothing():
    model, same = make(), make()
    apply_tensor_parallel(model, None, None, sequence_parallel=True)
    assert type(model) is Llama
    assert torch.equal(model(ids(5)), same(ids(5)))


@pytest.mark.parametrize("style", ["vocab", "column_embedding"])
def test_a_divided_table_for_shared_tokens_is_refused(style):
    parts = {"words": nn.Embedding(8, 8), "up": nn.Linear(8, 8), "down": nn.Linear(8, 8)}
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict(parts)])})
    plan = {
        "**.up": "column",
        "**.down": "row",
        "layers.0.words": style,
        "layers.0": "sequence_layer",
    }
    with pytest.raises(InvalidArgumentError, match=r"'layers.0.words' .* a part of its table"):
        explain(model, 2, plan, sequence_parallel=True)


WIDTH, WORDS = 12, 20
PLAN = {
    "words": "vocab", "layers.*.mlp.up": "column", "layers.*.mlp.down": "row",
    "layers.*": "sequence_layer", "head": "column_gather",
}  # fmt: skip


class Mlp(nn.Module):
    """Adds a residual that it is given, and scales what comes of its row-parallel layer."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x, residual):
        return self.down(F.gelu(self.up(x))) * self.scale + residual


class Attention(nn.Module):
    """Is given a bias that was made of the whole length, and its residual."""

    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, residual, bias):
        scores = self.q(x) @ x.transpose(1, 2) + bias
        return self.o(scores.softmax(-1) @ x) + residual


class Router(nn.Module):
    """Reads the weight of a layer that it does not call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return F.linear(x, self.layer.weight).tanh()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), Router()
        self.attention, self.mlp = Attention(), Mlp()
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)
        self.streams = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, bias, per_layer_input, input_ids=None):
        x = self.attention(self.norm(x), x, bias=bias)
        if input_ids is not None:
            x = x + input_ids[..., None] * self.streams
        x = x + self.gate(x) * per_layer_input
        return self.mlp(F.linear(x, self.other.weight), x), None


class Model(nn.Module):
    """Makes a bias of positions and an input of each layer of whole sequences."""

    def __init__(self, layer=Layer):
        super().__init__()
        self.words, self.dropout = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.0)
        self.inputs = nn.Linear(WIDTH, 2 * WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.between, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.ends = nn.LayerNorm(WIDTH)

    def run(self, layer, *args, **kwargs):
        return layer(*args, **kwargs)[0]

    def forward(self, ids):
        x = self.dropout(self.words(ids))
        length = x.shape[1]
        places = torch.arange(length, dtype=x.dtype)
        bias = -(places[:, None] - places).abs()
        bias = bias.masked_fill(places > places[:, None], -torch.inf)
        inputs = self.inputs(x).view(*x.shape[:2], 2, WIDTH)
        x = self.ends(x)
        for at, layer in enumerate(self.layers):
            x = self.run(layer, x, bias, inputs[:, :, at], input_ids=ids)
            x = self.ends(x) if at else self.between(x)
        return self.head(x.view(ids.shape[0], length, WIDTH))


def made(kind=Model, *args):
    torch.manual_seed(0)
    return kind(*args).double()


def trained():
    one, many = made(), divided(made(), PLAN)
    lengths = []
    many.layers[0].norm.register_forward_hook(lambda _m, _i, y: lengths.append(y.shape[1]))
    for length in (8, 7):
        compare(one, many, ids(length))
    many.run = lambda layer, *args, **kw: checkpoint(layer, *args, use_reentrant=False, **kw)[0]
    compare(one, many, ids())
    return lengths[:1]


def test_what_is_before_and_between_layers_is_as_in_one_process():
    assert run_ranks(trained, 2) == [[4], [4]]
    assert run_ranks(trained, 3) == [[3], [3], [2]]


def drawn():
    many = divided(made(), PLAN)
    many.dropout.p = 0.5
    inside = []
    many.layers[1].norm.register_forward_hook(lambda _m, _i, y: inside.append(torch.rand(1).item()))
    torch.manual_seed(3)
    many(ids()).square().mean().backward()
    return many.inputs.weight.grad.tolist(), inside[0], torch.rand(1).item()


def test_ranks_draw_alike_before_the_layers_and_each_for_itself_inside():
    (gradient, one, after), (same, other, again) = run_ranks(drawn, 2)
    assert gradient == same  # of what dropped the same tokens
    assert one != other
    assert after == again


class Streams(Model):
    """Hidden states are of several streams, [B, L, streams, H]."""

    def __init__(self):
        super().__init__(StreamLayer)

    def forward(self, ids):
        x = self.words(ids).unsqueeze(2).repeat(1, 1, 2, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.sum(2))


class StreamLayer(Layer):
    def forward(self, x):
        y = self.norm(x[:, :, 0])
        return x + self.mlp(y, y).unsqueeze(2) * self.streams


@distributed_test(world_size=2)
def test_streams_of_hidden_states():
    one, many = made(Streams), divided(made(Streams), PLAN)
    compare(one, many, ids())
    for length in (2, 3):  # of 3 tokens only the first rank has as many as there are streams
        with pytest.raises(InvalidArgumentError, match="two dims are as long as the sequence"):
            many(ids(length))


class Plain(Layer):
    def forward(self, x):
        return self.mlp(self.norm(x), x)


class Read(Model):
    """Uses a parameter of its own both before and between its layers."""

    def __init__(self):
        super().__init__(Plain)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids):
        x = self.layers[0](self.words(ids) * self.scale)
        return self.head(self.layers[1](x * self.scale))


@distributed_test(world_size=2)
def test_a_parameter_before_and_between_layers_is_refused():
    text = "Read uses 'scale' in a parallel region and outside of one"
    with pytest.raises(InvalidArgumentError, match=text):
        divided(made(Read), PLAN)(ids()).sum().backward()


class TwoLists(Model):
    """Its second list has sequences of half the length."""

    def __init__(self):
        super().__init__(Plain)
        self.others = nn.ModuleList([Plain(), Plain()])

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.between(x[:, ::2] + x[:, 1::2])
        for layer in self.others:
            x = layer(x)
        return self.head(x)


@distributed_test(world_size=2)
def test_each_list_of_layers_shares_out_its_own_sequences():
    lists = PLAN | {f"others.*.mlp.{n}": s for n, s in (("up", "column"), ("down", "row"))}
    found = {name: style for name, style in lists.items() if style != "sequence_layer"}
    for plan in (found, lists | {"others.*": "sequence_layer"}):
        many = divided(made(TwoLists), plan)
        for layers, length in ((many.layers, 4), (many.others, 2)):
            has_length = partial(require_length, length)
            layers[1].norm.register_forward_hook(has_length)
        compare(made(TwoLists), many, ids())


def require_length(length, _module, _given, out):
    assert out.shape[1] == length


class Body(nn.Module):
    """Adds the residuals of listed pairs itself."""

    def __init__(self):
        super().__init__()
        self.pairs = nn.ModuleList(nn.ModuleList([Mlp(), Mlp()]) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        for first, second in self.pairs:
            x = x + first(x, 0)
            x = x + second(x, 0)
        return self.norm(x)


class Paired(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.body = nn.Embedding(WORDS, WIDTH), Body()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        return self.head(self.body(self.words(ids)))


@distributed_test(world_size=2)
def test_what_adds_residuals_around_a_list_may_be_the_layer():
    plan = {"body.**.up": "column", "body.**.down": "row", "body": "sequence_layer"}
    compare(made(Paired), divided(made(Paired), plan), ids(7))


@distributed_test(world_size=2)
def test_lists_in_a_list_are_no_layers():
    class Stages(TwoLists):
        def __init__(self):
            super().__init__()
            self.stages = nn.ModuleList([self.layers, self.others])
            del self.layers, self.others

        layers, others = (property(lambda self, at=at: self.stages[at]) for at in (0, 1))

    names = (f"stages.*.*.mlp.{n}" for n in ("up", "down"))
    plan = {**dict(zip(names, ("column", "row"), strict=True)), "head": "column_gather"}
    compare(made(Stages), divided(made(Stages), plan), ids())


@dataclass
class Hidden:
    mean: torch.Tensor
    x: torch.Tensor
    same: torch.Tensor


class Returning(Plain):
    def forward(self, x):
        x = super().forward(x)
        return self.kind(x.mean(), x, 2 * x)


class Returned(Model):
    """Gets hidden states twice, behind another tensor, from its last layer."""

    def __init__(self, kind):
        super().__init__(Returning)
        Returning.kind = staticmethod(kind)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            _, x, same = tensors_in(layer(x))
        return self.head(x + same)


@distributed_test(world_size=2)
def test_layers_return_hidden_states_in_any_container():
    plan = {name: style for name, style in PLAN.items() if style != "sequence_layer"}
    for kind in (Hidden, namedtuple("Named", "mean x same"), lambda *x: list(x)):
        compare(made(Returned, kind), divided(made(Returned, kind), plan), ids(7))
    none = divided(made(Returned, lambda mean, *_: mean), plan)
    with pytest.raises(InvalidArgumentError, match=r"Returning must return hidden states"):
        none.layers[1](none.layers[0].norm(none.words(ids())))


class Early(TwoLists):
    """Gives shards to its head, to the layers of another list, or beside whole sequences."""

    def forward(self, ids, way):
        x = self.words(ids)
        y = self.layers[0](x)
        if way == "stack":
            return torch.stack([x, y])
        return self.head(y) if way == "head" else self.others[0](y)


@distributed_test(world_size=2)
@pytest.mark.parametrize("way", ["stack", "head", "list"])
def test_a_shard_outside_of_its_list_is_refused(way):
    plan = {n: s for n, s in PLAN.items() if s != "sequence_layer"}
    plan |= {f"others.*.mlp.{n}": s for n, s in (("up", "column"), ("down", "row"))}
    text = r"in Early does not fit" if way == "stack" else r"[43] of 7 tokens.* was not called"
    with pytest.raises(InvalidArgumentError, match=text):
        divided(made(Early), plan)(ids(7), way)


class Chunked(TwoLists):
    """Calls its layers with chunks of other lengths, and runs them, or their MLPs, again."""

    def forward(self, ids):
        x, done = self.words(ids), []
        for chunk in x.split((5, 4), 1):
            for layer in self.layers:
                chunk = self.again(layer, chunk)
            done.append(chunk)
        return self.head(torch.cat(done, 1))


def again(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


def inside(layer, x):  # as `recompute_layers` does it
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        return layer(x)
    finally:
        del layer.forward


def mlp_again(layer, x):
    layer.mlp.forward = partial(checkpoint, layer.mlp.forward, use_reentrant=False)
    try:
        return layer(x)
    finally:
        del layer.mlp.forward


@distributed_test(world_size=3)
def test_layers_run_again_with_the_length_of_their_call():
    plan = {n: s for n, s in PLAN.items() if s != "sequence_layer"}
    for way in (again, inside, mlp_again):
        one, many = made(Chunked), divided(made(Chunked), plan)
        one.again, many.again = again, way
        compare(one, many, ids(9))


@distributed_test(world_size=2)
def test_a_model_may_be_a_layer():
    one, x = made(Layer), torch.randn(2, 7, WIDTH, dtype=torch.float64)
    plan = {n.removeprefix("layers.*").lstrip("."): s for n, s in PLAN.items() if "layers" in n}
    many = divided(copy.deepcopy(one), plan)
    for bias in (0, x.new_zeros(7, 7)):  # the second call comes after an error
        ours, theirs = (model(x, bias, x)[0] for model in (many, one))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        with pytest.raises(InvalidArgumentError, match="in Layer does not fit"):
            many(x, x.new_zeros(6, 6), x)


def test_a_model_without_a_list_of_layers_is_refused():
    plan = {"up": "column", "down": "row"}
    with pytest.raises(
        InvalidArgumentError, match=r"Mlp has no list of modules .* 'sequence_layer'"
    ):
        explain(Mlp(), 2, plan, sequence_parallel=True)

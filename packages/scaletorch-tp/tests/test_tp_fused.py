"""Several weights in one: gate and up, or query, key and value, at times replicated."""

import copy
from unittest.mock import patch

import pytest
import torch
from gpts import HIDDEN as WIDTH
from gpts import LENGTH, Conv1D, Gpt2, Packed
from llamas import as_one_process, close, rotate
from torch import nn
from torch.distributed import all_reduce, get_rank, group
from torch.nn import functional as F

from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.placement import Cut, shard_sizes
from scaletorch.parallel.tensor_parallel import (
    ColumnParallelLinear,
    Divide,
    Fused,
    apply_tensor_parallel,
    explain,
    gather_tensors,
    shard_dims,
    split_by_owner,
    take_own,
)
from scaletorch.parallel.tensor_parallel.building import find_cuts

HIDDEN, HEAD_DIM, VOCAB = 10, 4, 13


def transposed(nx, nf, bias):
    return Conv1D(nf, nx, bias)


class Attention(nn.Module):
    def __init__(self, heads, kv_heads, bias, dense):
        super().__init__()
        self.head_dim, self.num_heads, self.num_kv_heads = HEAD_DIM, heads, kv_heads
        self.qkv = dense(HIDDEN, (heads + 2 * kv_heads) * HEAD_DIM, bias)
        self.out = nn.Linear(heads * HEAD_DIM, HIDDEN, bias)

    def forward(self, x):
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        packed = self.qkv(x).split([n * HEAD_DIM for n in counts], -1)
        q, k, v = (t.view(*x.shape[:2], -1, HEAD_DIM).transpose(1, 2) for t in packed)
        q, k = rotate(q), rotate(k)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, *options):
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(HIDDEN), Attention(*options)

    def forward(self, x):
        return x + self.attention(self.norm(x))


class Net(nn.Module):
    def __init__(self, heads=8, kv_heads=2, bias=True, dense=nn.Linear):
        torch.manual_seed(0)
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([Layer(heads, kv_heads, bias, dense)])
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.double()

    def forward(self, ids):
        return self.head(self.layers[0](self.embed(ids)))


def plan(heads=8, kv_heads=2, **_):
    return {
        "layers.0.attention": Divide("num_heads", "num_kv_heads"),
        "layers.0.attention.qkv": Fused(
            "column", tuple(n * HEAD_DIM for n in (heads, kv_heads, kv_heads))
        ),
        "layers.0.attention.out": "row",
        "head": "column_gather",
    }


def pieces_of_qkv(options, asynchronous, **how):
    """Train as one process does; return the gradients of the fused weight by owner."""
    plain = Net(**options)
    model, grads = as_one_process(plain, plan(**options), asynchronous=asynchronous, **how)
    return split_by_owner(model, grads)["layers.0.attention.qkv.weight"]


# Options of the model, and the first rank with the keys of each rank.
CASES = [
    ({"heads": 8, "kv_heads": 2}, (0, 0, 2, 2), False, {}),
    ({"heads": 8, "kv_heads": 2, "bias": False}, (0, 0, 2, 2), True, {}),
    ({"heads": 6, "kv_heads": 3}, (0, 0, 2, 3), True, {}),
    ({"heads": 6, "kv_heads": 2, "dense": transposed}, (0, 0, 2, 2), False, {}),
    ({"heads": 4, "kv_heads": 1}, (0, 0, 0), False, {"sequence_parallel": True}),
]


@pytest.mark.parametrize(("options", "owners", "asynchronous", "how"), CASES)
def test_replicated_heads_train_as_one_process(options, owners, asynchronous, how):
    found = run_ranks(pieces_of_qkv, len(owners), options, asynchronous, **how)
    held = {}
    for rank, (pieces, first) in enumerate(zip(found, owners, strict=True)):
        assert [owner for owner, _ in pieces] == [rank, first, first]
        for index, (owner, piece) in enumerate(pieces):  # replicas have the same bits
            assert torch.equal(piece, held.setdefault((index, owner), piece))


@distributed_test(world_size=4)
def test_ranks_send_what_is_replicated_and_no_more():
    model, rank = apply_tensor_parallel(Net(), plan(), group.WORLD), get_rank()
    with patch.object(torch.distributed, "all_reduce", wraps=all_reduce) as sums:
        model(torch.arange(10).view(2, 5)).sum().backward()
    # Of 8 query and 2 + 2 key/value heads the latter travel: 4 of 12, of the weight and the bias.
    replicas = 4 * HEAD_DIM * (HIDDEN + 1)
    sent = sum(call.args[0].numel() for call in sums.call_args_list)
    assert sent == 3 * 10 * HIDDEN + replicas  # of ten tokens: a sum, and two of gradients
    first = 32 + rank // 2 * 4
    held = range(8 * rank, 8 * rank + 8), range(first, first + 4), range(first + 8, first + 12)
    for name in ("weight", "bias"):
        assert find_cuts(model)[f"layers.0.attention.qkv.{name}"].cut.ranges[rank] == held


@distributed_test(world_size=3)
def test_an_output_of_replicas_is_gathered_once():
    """Of replicas one is taken into the whole output, and into the whole weight."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 7).double()
    cut = Cut.of((4, 3), (0, 0, 1))
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    mine = x.detach().clone().requires_grad_()
    for asynchronous in (False, True):
        # Shards are made with the gradients that there are.
        x.grad = mine.grad = plain.weight.grad = plain.bias.grad = None
        options = {"gather_output": True, "async_all_reduce": asynchronous}
        layer = ColumnParallelLinear.convert(copy.deepcopy(plain), group.WORLD, {}, cut, **options)
        weight = torch.arange(14.0, dtype=torch.float64).view(2, 7)
        (plain(x) * weight).sum().backward()
        (layer(mine) * weight).sum().backward()
        close(mine.grad, x.grad, "input gradient")
        grads = gather_tensors(layer, {n: p.grad for n, p in layer.named_parameters()})
        for name, parameter in plain.named_parameters():
            close(grads[name], parameter.grad, name)
            close(getattr(layer, name).grad, take_own(layer, name, parameter.grad), f"own {name}")
    own = {name: parameter.grad for name, parameter in layer.named_parameters()}
    for [(owner, _)] in split_by_owner(layer, own).values():
        assert owner == (0, 0, 2)[get_rank()]
    with pytest.raises(ValueError, match=r"'bias' has shape \(7,\), but this rank's shard has"):
        split_by_owner(layer, {"bias": plain.bias})


@distributed_test(world_size=3)
def test_unequal_lengths_are_gathered_in_their_order_and_summed_over_rows():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 10), nn.Linear(10, 3))
    x = torch.randn(5, 4)
    for styles in (["column_gather"], ["column", "row"]):
        fused = {str(index): Fused(style, (7, 3)) for index, style in enumerate(styles)}
        model = apply_tensor_parallel(copy.deepcopy(plain), fused, group.WORLD)
        torch.testing.assert_close(model(x), plain(x))
        assert model[0].weight.shape[0] == (4, 3, 3)[get_rank()]
        for index, length in ((0, 7), (1, 3)):  # every rank has some of each
            own = plain[0].bias.split([7, 3])[index].split(shard_sizes(length, 3))[get_rank()]
            assert set(own.tolist()) <= set(model[0].bias.tolist())


def shapes_of_gpt2():
    model = apply_tensor_parallel(Gpt2(), None, group.WORLD)
    return shard_dims(model), {n: tuple(p.shape) for n, p in model.named_parameters()}


def test_the_sharded_dim_of_a_transposed_weight():
    dims, shapes = run_ranks(shapes_of_gpt2, 2)[1]
    assert dims["transformer.h.0.attn.c_attn.weight"] == 1
    assert dims["transformer.h.0.attn.c_proj.weight"] == 0
    assert dims["transformer.h.0.attn.c_proj.bias"] is None
    assert shapes["transformer.h.0.attn.c_attn.weight"] == (WIDTH, 3 * WIDTH // 2)
    assert shapes["transformer.h.0.mlp.c_proj.weight"] == (15, WIDTH)
    assert shapes["transformer.wpe.weight"] == (LENGTH, WIDTH)
    told = {p.name: p for p in explain(Gpt2(), 2).parameters}
    assert {name: parameter.dim for name, parameter in told.items()} == dims
    assert told["transformer.h.0.attn.c_attn.weight"].style == "Fused"


@pytest.mark.parametrize(
    ("style", "lengths", "text"),
    [
        ("vocab", 2, "'column', 'column_gather', 'row'"),
        *(("column", bad, "the length of each") for bad in (0, (4, -1), (), (4, 2.0))),
    ],
)
def test_a_fused_style_that_cannot_be(style, lengths, text):
    with pytest.raises(ValueError, match=text):
        Fused(style, lengths)


def odd_conv1d():
    odd = nn.ModuleDict({"up": Conv1D(6, 4)})
    odd.up.nx = 5
    return odd


def heads(**styles):
    return plan() | {f"layers.0.attention.{name}": style for name, style in styles.items()}


# What is gathered is cut anywhere: each rank needs some of each of the lengths.
GATHER = {"qkv": Fused("column_gather", (32, 8, 8)), "out": "row_split"}
REFUSED = [
    (Packed, {"qkv": Fused("column", (12, 6))}, 2, "add up to 18 features, but it has 24"),
    (Packed, {"qkv": Fused("column", 5)}, 2, "add up to 20 features, but it has 24"),
    (Packed, {"embed": Fused("column", 2)}, 2, "it is a Embedding, not a Linear"),
    (odd_conv1d, {"up": "column"}, 2, "it is a Conv1D, not a Linear itself"),
    (Net, plan(), 9, "query heads of layers.0.attention = 8; .* tp sizes up to 8 are legal"),
    (Net, heads(out=Fused("row", (8, 24))), 4, "has 2 heads, which are not replicated"),
    (Net, heads(**GATHER), 9, "does not fit .*attention.qkv.out_features = 8.* divide 2 are"),
    (Net, heads(qkv=Fused("column", (30, 10, 8))), 4, "does not .*features = 30.* divide 2 are"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "styles", "tp", "text"), REFUSED)
def test_what_does_not_fit_the_module(build, styles, tp, text):
    with pytest.raises(ValueError, match=text):
        explain(build(), tp, styles)

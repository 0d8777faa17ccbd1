"""Query, key and value in one weight, with fewer key/value heads than ranks."""

import copy
from unittest.mock import patch

import pytest
import torch
from gpts import Conv1D
from hypothesis import given, settings
from hypothesis import strategies as st
from llamas import rotate
from torch import nn
from torch.distributed import all_reduce, checkpoint, get_rank, group
from torch.nn import functional as F

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.placement import fuse, share_cut
from scaletorch.parallel.tensor_parallel import (
    ColumnParallelLinear,
    Divide,
    Fused,
    apply_tensor_parallel,
    explain,
    gather_state_dict,
    gather_tensors,
    load_full_state_dict,
    sharded_state_dict,
    split_by_owner,
    take_own,
)
from scaletorch.parallel.tensor_parallel.building import find_cuts
from scaletorch.parallel.tensor_parallel.plans.attention import head_cuts
from scaletorch.parallel.tensor_parallel.plans.resolve import resolve

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


class Net(nn.Module):
    def __init__(self, heads=8, kv_heads=2, bias=True, dense=nn.Linear, seed=0):
        torch.manual_seed(seed)
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.norm = nn.RMSNorm(HIDDEN)
        self.attention = Attention(heads, kv_heads, bias, dense)
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.double()

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.attention(self.norm(x)))


def plan(heads=8, kv_heads=2, **_):
    return {
        "attention": Divide("num_heads", "num_kv_heads"),
        "attention.qkv": Fused("column", tuple(n * HEAD_DIM for n in (heads, kv_heads, kv_heads))),
        "attention.out": "row",
        "head": "column_gather",
    }


def sharded(options, **how):
    return apply_tensor_parallel(Net(**options), plan(**options), group.WORLD, **how)


def step(model):
    """Add up two batches' gradients and take a step of SGD."""
    torch.manual_seed(5)
    for ids in torch.randint(VOCAB, (2, 2, 7)):
        out = model(ids)
        out.sin().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    return out.detach(), {n: p.grad for n, p in model.named_parameters()}


def same(state, expected):
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def as_one_process(options, how, asynchronous):
    plain, model = Net(**options), sharded(options, **how)
    model.attention.qkv.async_all_reduce = asynchronous
    same(gather_state_dict(model), plain.state_dict())
    (out, grads), (expected_out, expected) = step(model), step(plain)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(out, expected_out, **close)
    for name, whole in gather_tensors(model, grads).items():
        torch.testing.assert_close(whole, expected[name], **close)
        torch.testing.assert_close(grads[name], take_own(model, name, expected[name]), **close)
    torch.testing.assert_close(gather_state_dict(model), plain.state_dict(), **close)
    owned = split_by_owner(model, grads)
    mine = [piece for pieces in owned.values() for owner, piece in pieces if owner == get_rank()]
    total = sum((piece.square().sum() for piece in mine), start=torch.zeros(()).double())
    all_reduce(total)  # each element counts once in the norm
    torch.testing.assert_close(total, sum(g.square().sum() for g in expected.values()), **close)
    return [owned[f"attention.qkv.{name}"] for name in ("weight", "bias") if options["bias"]]


CASES = [
    (4, {"heads": 8, "kv_heads": 2, "bias": True}, {}, False),
    (4, {"heads": 8, "kv_heads": 2, "bias": False}, {}, True),
    (4, {"heads": 6, "kv_heads": 3, "bias": True}, {}, True),
    (4, {"heads": 6, "kv_heads": 2, "bias": True, "dense": transposed}, {}, False),
    (3, {"heads": 4, "kv_heads": 1, "bias": True}, {"sequence_parallel": True}, False),
]


@pytest.mark.parametrize(("tp", "options", "how", "asynchronous"), CASES)
def test_replicated_parts_train_as_one_process(tp, options, how, asynchronous):
    query, key_value = head_cuts(options["heads"], options["kv_heads"], tp)
    held = {}
    for rank, found in enumerate(run_ranks(as_one_process, tp, options, how, asynchronous)):
        for name, pieces in enumerate(found):
            (first,) = key_value.owners(rank)
            assert [owner for owner, _ in pieces] == [rank, first, first]
            assert pieces[0][1].numel() % (query.sizes[rank] * HEAD_DIM) == 0
            for part, (owner, piece) in enumerate(pieces):  # replicas have the same bits
                assert torch.equal(piece, held.setdefault((name, part, owner), piece))


def loaded(state, folder):
    """Load a state in every way; give it back, and leave a checkpoint for another tp."""
    from safetensors.torch import load_file

    models = [sharded({"seed": 1}) for _ in range(3)]
    load_full_state_dict(models[0], state)
    load_full_state_dict(models[1], load_file(folder / "model.safetensors"))
    if (folder / ".metadata").exists():
        checkpoint.load(sharded_state_dict(models[2]), checkpoint_id=folder)
        same(gather_state_dict(models[2]), state)
    for model in models[:2]:
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, take_own(model, name, state[name])), name
    checkpoint.save(sharded_state_dict(models[0]), checkpoint_id=folder)
    return gather_state_dict(copy.deepcopy(models[1]))


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")  # the ranks' own, of before
def test_state_goes_round_bit_for_bit(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    state = plain = Net().state_dict()
    save_file(plain, tmp_path / "model.safetensors")
    for tp in (4, 3, 2):
        found = run_ranks(loaded, tp, state, tmp_path)
        for state in found:
            same(state, plain)


def measured():
    """Elements that this rank sums over the ranks, and how its weights lie."""
    model, sent = sharded({}), []

    def counted(x, *args, **kwargs):
        sent.append(x.numel())
        return all_reduce(x, *args, **kwargs)

    with patch.object(torch.distributed, "all_reduce", counted):
        model(torch.arange(10).view(2, 5)).sum().backward()
    held = {name: cut.cut.ranges[get_rank()] for name, cut in find_cuts(model).items()}
    return sum(sent), held, {n: tuple(p.shape) for n, p in model.named_parameters()}


def test_what_ranks_hold_and_send_is_told():
    told = explain(Net(), 4, plan())
    # Of 8 query and 2 + 2 key/value heads the latter travel: 4 of 12, of the weight and the bias.
    replicas = 4 * HEAD_DIM * (HIDDEN + 1)
    for rank, (sent, held, shapes) in enumerate(run_ranks(measured, 4)):
        assert sent == 3 * 10 * HIDDEN + replicas  # of ten tokens: a sum, and two of gradients
        assert {p.name: p.local_shapes[rank] for p in told.parameters} == shapes
        query, key, value = held["attention.qkv.weight"]
        assert query == range(8 * rank, 8 * rank + 8)
        assert key == range(32 + rank // 2 * 4, 36 + rank // 2 * 4)
        assert value == range(40 + rank // 2 * 4, 44 + rank // 2 * 4)
        assert held["attention.qkv.bias"] == held["attention.qkv.weight"]


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 8), st.integers(0, 1))
def test_shares_and_replicas_make_the_whole_again(kv_heads, groups, tp, dim):
    heads = kv_heads * groups
    query, key_value = head_cuts(heads, kv_heads, min(tp, heads))
    cut = fuse([query.times(2), key_value.times(2), share_cut(9, min(tp, heads)), key_value])
    length = 2 * heads + 3 * kv_heads + 9
    whole = torch.arange(2 * length).view((-1, 2) if dim == 0 else (2, -1))
    shares = [cut.take(whole, dim, rank) for rank in range(min(tp, heads))]
    assert cut.whole == length
    assert cut.replicated == (kv_heads < min(tp, heads))
    assert tuple(share.shape[dim] for share in shares) == cut.sizes
    assert torch.equal(cut.arrange(torch.cat(shares, dim), dim), whole)
    for rank, share in enumerate(shares):
        indices = torch.tensor([i for piece in cut.ranges[rank] for i in piece])
        assert torch.equal(whole.index_select(dim, indices), share)


def gathered():
    """By hand: one replica's output is taken into the whole, and all make its gradient."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 9).double()
    query, key_value = head_cuts(3, 1, 3)
    cut = fuse([query.times(2), key_value.times(2), key_value])
    layer = ColumnParallelLinear.convert(
        copy.deepcopy(plain), group.WORLD, {}, cut, gather_output=True
    )
    x = torch.randn(2, 3, dtype=torch.float64)
    torch.testing.assert_close(layer(x), plain(x))
    for module in (layer, plain):
        module(x).sin().sum().backward()
    for name, parameter in plain.named_parameters():
        own = take_own(layer, name, parameter.grad)
        torch.testing.assert_close(getattr(layer, name).grad, own)
    with pytest.raises(
        ValueError, match=r"'bias' has shape \(9,\), but this rank's shard has \(5,"
    ):
        split_by_owner(layer, {"bias": plain.bias})


def test_an_output_of_replicas_is_gathered_once():
    run_ranks(gathered, 3)


def refuse(tp, text, **styles):
    changed = {f"attention.{name}": style for name, style in styles.items()}
    with pytest.raises(ValueError, match=text):
        resolve(Net(), plan() | changed, tp)


def test_what_cannot_be_replicated_names_what_would_do():
    refuse(9, "query heads of attention = 8; .* tp sizes up to 8 are legal", out="row")
    refuse(
        4,
        "row.*has 2 heads, which are not replicated.* up to 2 are legal",
        out=Fused("row", (8, 24)),
    )
    # What is gathered is cut anywhere: each rank needs some of each part.
    gather = {"qkv": Fused("column_gather", (32, 8, 8)), "out": "row_split"}
    refuse(
        9, "without a share of attention.qkv.out_features = 8, .* legal tp sizes are 2", **gather
    )
    # Projections that do not fit together as heads.
    odd = Fused("column", (30, 10, 8))
    refuse(4, "tp = 4 does not divide .*out_features = 30.* legal tp sizes are 2", qkv=odd)

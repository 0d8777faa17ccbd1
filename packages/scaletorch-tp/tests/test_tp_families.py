"""GPT-2 and GPT-NeoX by their names, and weights of packed parts."""

import copy

import pytest
import torch
from gpts import HIDDEN, LENGTH, PACKED, VOCAB, Conv1D, Gpt2, Neox, Packed, linear
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import group

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.placement import fuse, share_cut
from scaletorch.parallel.tensor_parallel import (
    Fused,
    apply_tensor_parallel,
    explain,
    gather_state_dict,
    gather_tensors,
    load_full_state_dict,
    shard_dims,
)
from scaletorch.parallel.tensor_parallel.plans.resolve import resolve


class ScaledWordEmbedding(nn.Embedding):
    """As transformers has it for Gemma and BART."""

    def __init__(self, scale, **options):
        super().__init__(VOCAB, HIDDEN, padding_idx=1, **options)
        self.embed_scale = scale

    def forward(self, ids):
        return super().forward(ids) * self.embed_scale


def make(kind, *args):
    torch.manual_seed(3)
    return kind(*args).double()


def train(model):
    torch.manual_seed(5)
    ids = torch.randint(VOCAB, (2, LENGTH))
    for _ in range(2):
        model.zero_grad()
        out = model(ids)
        out.sin().sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
    return out.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def as_one_process(kind, args, plan):
    plain = make(kind, *args)
    model = apply_tensor_parallel(copy.deepcopy(plain), plan, group.WORLD)
    before = plain.state_dict()
    state = gather_state_dict(model)
    assert list(state) == list(before)
    assert all(torch.equal(state[name], value) for name, value in before.items())
    other = apply_tensor_parallel(make(kind, *args).apply(_forget), plan, group.WORLD)
    load_full_state_dict(other, state)
    assert all(
        torch.equal(p, q) for p, q in zip(other.parameters(), model.parameters(), strict=True)
    )
    out, grads = train(model)
    expected, expected_grads = train(plain)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert set(grads) == set(expected_grads)
    for name, grad in gather_tensors(model, grads).items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-10, atol=1e-11)
    return shard_dims(model), {n: tuple(p.shape) for n, p in model.named_parameters()}


def _forget(module):
    for parameter in module._parameters.values():
        if parameter is not None:
            nn.init.zeros_(parameter)


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize(
    ("kind", "args"),
    [(Gpt2, ()), (Gpt2, (linear,)), (Neox, ()), (Neox, ("lm_head",))],
    ids=["gpt2", "gpt2-linear", "neox", "neox-lm-head"],
)
def test_a_known_family_trains_as_one_process(kind, args, tp):
    run_ranks(as_one_process, tp, kind, args, None)


def scaled(scale):
    torch.manual_seed(0)
    plain = nn.Sequential(ScaledWordEmbedding(scale))
    model = apply_tensor_parallel(copy.deepcopy(plain), {"0": "vocab"}, group.WORLD)
    ids = torch.arange(VOCAB).view(1, -1)
    torch.testing.assert_close(model(ids), plain(ids))
    (model(ids) ** 2).sum().backward()
    (plain(ids) ** 2).sum().backward()
    grads = gather_tensors(model, {"0.weight": model[0].weight.grad})
    torch.testing.assert_close(grads["0.weight"], plain[0].weight.grad)
    return model[0].weight.shape[0]


@pytest.mark.parametrize("scale", [2.5, torch.tensor(2.5)])
def test_a_scaled_embedding_stays_scaled(scale):
    assert run_ranks(scaled, 2, scale) == [7, 6]


@pytest.mark.parametrize("option", ["max_norm", "sparse", "scale_grad_by_freq"])
def test_a_scaled_embedding_with_options_of_rows_is_refused(option):
    model = nn.Sequential(ScaledWordEmbedding(2.5, **{option: True}))
    with pytest.raises(ValueError, match=f"it uses {option}, which is not supported on shards"):
        resolve(model, {"0": "vocab"}, 2)


def test_which_dim_of_a_transposed_weight_is_sharded():
    dims, shapes = run_ranks(as_one_process, 2, Gpt2, (), None)[1]
    assert dims["transformer.h.0.attn.c_attn.weight"] == 1
    assert dims["transformer.h.0.attn.c_proj.weight"] == 0
    assert dims["transformer.h.0.attn.c_proj.bias"] is None
    assert shapes["transformer.h.0.attn.c_attn.weight"] == (HIDDEN, 3 * HIDDEN // 2)
    assert shapes["transformer.h.0.mlp.c_proj.weight"] == (15, HIDDEN)
    assert shapes["transformer.wpe.weight"] == (LENGTH, HIDDEN)
    told = {p.name: p for p in explain(Gpt2(), 2).parameters}
    assert {name: told[name].local_shapes[1] for name in shapes} == shapes
    assert {name: parameter.dim for name, parameter in told.items()} == dims
    assert told["transformer.h.0.attn.c_attn.weight"].style == "column, 3 projections"


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_packed_parts_are_each_cut(tp):
    run_ranks(as_one_process, tp, Packed, (), PACKED)


def gathered():
    plain = nn.Sequential(nn.Linear(4, 10), nn.Linear(10, 3))
    model = copy.deepcopy(plain)
    apply_tensor_parallel(model, {"0": Fused("column_gather", (7, 3))}, group.WORLD)
    x = torch.randn(5, 4)
    torch.testing.assert_close(model(x), plain(x))
    model = copy.deepcopy(plain)
    plan = {"0": Fused("column", (7, 3)), "1": Fused("row", (7, 3))}
    apply_tensor_parallel(model, plan, group.WORLD)
    torch.testing.assert_close(model(x), plain(x))
    return model[0].weight.shape[0]


def test_parts_are_gathered_in_their_order_and_summed_over_rows():
    torch.manual_seed(0)
    assert run_ranks(gathered, 3) == [4, 3, 3]


CUTS = st.lists(st.integers(4, 9), min_size=1, max_size=4)


@settings(deadline=None)
@given(CUTS, st.integers(1, 4), st.integers(0, 1))
def test_shares_of_parts_make_the_whole_again(lengths, tp, dim):
    cut = fuse([share_cut(n, tp) for n in lengths])
    whole = torch.arange(2 * sum(lengths)).view((-1, 2) if dim == 0 else (2, -1))
    shares = [cut.take(whole, dim, rank) for rank in range(tp)]
    assert tuple(share.shape[dim] for share in shares) == cut.sizes
    assert cut.whole == whole.shape[dim]
    assert torch.equal(cut.arrange(torch.cat(shares, dim), dim), whole)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for start, length in zip(starts, lengths, strict=True):
        part = whole.narrow(dim, start, length)
        for rank, share in enumerate(shares):
            own = share_cut(length, tp).take(part, dim, rank)
            held = {tuple(v) for v in share.movedim(dim, 0).tolist()}
            assert {tuple(v) for v in own.movedim(dim, 0).tolist()} <= held


@pytest.mark.parametrize(
    ("style", "parts", "text"),
    [
        ("vocab", 2, "'column', 'column_gather', 'row'"),
        ("column", 0, "a number of equal projections"),
        ("column", (4, -1), "a number of equal projections"),
        ("column", (), "a number of equal projections"),
        ("column", (4, 2.0), "a number of equal projections"),
    ],
)
def test_a_fused_style_that_cannot_be(style, parts, text):
    with pytest.raises(ValueError, match=text):
        Fused(style, parts)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"qkv": Fused("column", (12, 6))}, "its projections add up to 18 features, but it has 24"),
        ({"qkv": Fused("column", 5)}, "its 24 features are not 5 equal projections"),
        ({"embed": Fused("column", 2)}, "it is a Embedding, not a Linear"),
    ],
)
def test_parts_that_do_not_fit_the_module(plan, text):
    with pytest.raises(ValueError, match=text):
        resolve(Packed(), plan, 2)


def test_a_transposed_layer_is_known_by_its_structure():
    odd = nn.ModuleDict({"up": Conv1D(6, 4)})
    odd.up.nx = 5
    with pytest.raises(ValueError, match="it is a Conv1D, not a Linear itself"):
        resolve(odd, {"up": "column"}, 2)
    odd.up.nx = 4
    assert len(resolve(odd, {"up": "column"}, 2).matches) == 1

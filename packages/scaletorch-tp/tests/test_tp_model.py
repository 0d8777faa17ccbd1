"""Whole models: every layout trains as one process does."""

from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import pytest
import torch
from gpts import PACKED, Gpt2, Packed, linear
from llamas import (
    HEAD_DIM,
    OWN_PLAN,
    Attention,
    CountingAttention,
    HeadNorm,
    as_one_process,
    loss_of,
    make,
    train,
    whole_names,
)
from torch import nn
from torch.distributed import group

from scaletorch.dist import all_reduce
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.tensor_parallel import (
    apply_tensor_parallel,
    gather_tensors,
    split_by_owner,
)
from scaletorch.parallel.tensor_parallel.regions import region
from scaletorch.parallel.tensor_parallel.sharing import gradient_sums

COUNTING = {"heads": 8, "kv_heads": 4, "attention": CountingAttention, "norm": nn.Identity}
WITHOUT_COUNTS = {name: style for name, style in OWN_PLAN.items() if name != "**.self_attn"}
NORMS = {"heads": 4, "kv_heads": 2, "norm": HeadNorm}  # no plan names norms of heads
MODELS = [
    (make, COUNTING, OWN_PLAN),
    (make, {"tied": True, "kv_heads": 2}, None),
    (make, {"heads": 8, "kv_heads": 4, "biases": (False, False)}, None),
    (make, {"recompute": "reentrant", "tied": True}, None),
    (make, {"recompute": "non-reentrant", "tied": True}, None),
    (make, NORMS, None),
    (make, {**NORMS, "recompute": "reentrant"}, None),
    (make, {**NORMS, "change": "norms tied", "recompute": "non-reentrant"}, None),
    (make, {**NORMS, "change": "norm frozen", "recompute": "reentrant"}, None),
    (make, {**NORMS, "change": "norm frozen"}, None),
    (make, {"kv_heads": 2}, WITHOUT_COUNTS),  # projections are cut at heads in any case
    (make, {"kind": Gpt2}, None),
    (make, {"kind": partial(Gpt2, linear)}, None),
    (make, {"kind": Packed}, PACKED),
]


def every_model():
    for build, options, plan in MODELS:
        shares = (False, True) if plan is not PACKED else (False,)  # which returns hidden states
        for sequence_parallel in shares:
            as_one_process(build(**options), plan, sequence_parallel=sequence_parallel)
    as_one_process(make(**NORMS, change="norms tied"), copied=True)
    for kv_heads in (4, 8):
        as_one_process(make(**COUNTING | {"kv_heads": kv_heads}), OWN_PLAN, asynchronous=True)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_trains_as_one_process(tp):
    run_ranks(every_model, tp)


def sizes_and_shards(heads, kv_heads):
    """Train as one process does; return the heads here, and the gradients of keys by owner."""
    model, grads = as_one_process(make(heads=heads, kv_heads=kv_heads))
    attention, owned = model.layers[0].self_attn, split_by_owner(model, grads)
    sizes = [getattr(attention, n).weight.shape[0] // HEAD_DIM for n in ("q_proj", "k_proj")]
    return sizes, {(n, owner): g for n in grads if "k_proj" in n for owner, g in owned[n]}


@pytest.mark.parametrize(
    ("tp", "heads", "kv_heads", "expected"),
    [
        (4, 6, 6, [[2, 2], [2, 2], [1, 1], [1, 1]]),
        (4, 8, 2, [[2, 1], [2, 1], [2, 1], [2, 1]]),
        (4, 6, 3, [[1, 1], [1, 1], [2, 1], [2, 1]]),
        (4, 6, 2, [[2, 1], [1, 1], [2, 1], [1, 1]]),
        (3, 4, 1, [[2, 1], [1, 1], [1, 1]]),
        (2, 6, 3, [[4, 2], [2, 1]]),
    ],
)
def test_heads_that_do_not_divide_train_as_one_process(tp, heads, kv_heads, expected):
    results = run_ranks(sizes_and_shards, tp, heads, kv_heads)
    assert [sizes for sizes, _ in results] == expected
    held = {}
    for _, shards in results:  # replicas have the same bits
        for key, grad in shards.items():
            assert torch.equal(grad, held.setdefault(key, grad))


class FewKeys(nn.Module):
    """6 query heads and one key/value head of which 3 ranks have less than an element each."""

    def __init__(self):
        super().__init__()
        self.head_dim, self.embed = 2, nn.Embedding(13, 8)
        self.q, self.k, self.v = nn.Linear(8, 12), nn.Linear(8, 2), nn.Linear(8, 2)
        self.o = nn.Linear(12, 11)

    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = (f(x).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


@distributed_test(world_size=3)
def test_a_key_head_shorter_than_the_ranks_is_replicated():
    as_one_process(make(FewKeys), {**dict.fromkeys("qkv", "column"), "o": "row"})


@distributed_test(world_size=4)
def test_a_frozen_replica_gets_no_gradient():
    model = make(heads=4, kv_heads=2)
    model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
    apply_tensor_parallel(model, group=group.WORLD)
    ids = torch.arange(8).view(2, 4)
    with torch.no_grad():
        expected = model(ids)
    out = model(ids)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert model.layers[0].self_attn.k_proj.weight.grad is None
    assert model.layers[0].self_attn.k_proj.bias.grad is not None


def in_bfloat16(autocast):
    """Squared errors of outputs and gradients against float64: one process's, then ours."""
    errors = torch.zeros(2, 2, dtype=torch.float64)
    for seed in range(6):
        weights = make(seed=seed).bfloat16().state_dict()
        reference = make()
        reference.load_state_dict(weights)
        out, _, grads = train(reference)
        for sharded in (False, True):
            model = make().to(torch.float32 if autocast else torch.bfloat16)
            model.load_state_dict(weights)
            if sharded:
                apply_tensor_parallel(model, group=group.WORLD)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                got_out, _, got = train(model)
            assert got_out.dtype == torch.bfloat16
            got = gather_tensors(model, got)
            errors[sharded, 0] += (got_out - out).square().sum()
            errors[sharded, 1] += sum((got[n] - grads[n]).square().sum() for n in grads)
    return errors.sqrt().tolist()


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("tp", [2, 4])
def test_bfloat16_loses_no_more_than_in_one_process(autocast, tp):
    one, sharded = run_ranks(in_bfloat16, tp, autocast)[0]
    assert sharded[0] < 1.25 * one[0]
    assert sharded[1] < 1.25 * one[1]


def replicas_agree():
    model = apply_tensor_parallel(make(**NORMS, tied=True), group=group.WORLD)
    for _ in range(3):
        model.zero_grad()
        train(model)
    return {name: model.get_parameter(name).detach() for name in whole_names(model)}


def test_replicated_parameters_stay_bitwise_equal():
    first, *others = run_ranks(replicas_agree, 4)
    assert set(first) >= {"norm.weight", "layers.0.self_attn.q_norm.bias"}
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


@distributed_test(world_size=2)
def test_a_plan_that_does_not_compose_is_an_error_of_the_layer():
    plan = {name: "column" if "_proj" in name else style for name, style in OWN_PLAN.items()}
    model = apply_tensor_parallel(make(attention=CountingAttention), plan, group.WORLD)
    rank = group.WORLD.rank()
    with pytest.raises(ValueError, match=rf"rank {rank}.* last dim 24.*\(2, 7, 12\)"):
        model(torch.arange(14).view(2, 7) % 13)  # o_proj gets a shard, and takes its whole input


def test_one_rank_leaves_modules_between_alone():
    attention = apply_tensor_parallel(make(**NORMS)).layers[0].self_attn
    assert (type(attention), type(attention.q_norm)) == (Attention, HeadNorm)


def dtypes_of_sums():
    """Return the dtypes in which gradients of norms and of replicated heads are summed."""
    model = apply_tensor_parallel(make(**NORMS).bfloat16(), group=group.WORLD)
    found = {}
    with ExitStack() as stack:
        for module in (gradient_sums, region):
            own = found[module.__name__.rpartition(".")[2]] = set()

            def noting(data, group, own=own, **overlap):
                own |= set() if overlap else {data.dtype}  # not the input's gradient
                return all_reduce(data, group=group, **overlap)

            stack.enter_context(patch.object(module, "all_reduce", noting))
        loss_of(model, 1)[0].backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    return found


def test_gradients_of_16_bits_are_summed_in_float32():
    for found in run_ranks(dtypes_of_sums, 4):
        assert found == {"gradient_sums": {torch.float32}, "region": {torch.float32}}

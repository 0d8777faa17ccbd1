"""Sizes that tp does not divide, and fewer key/value heads than ranks."""

import copy

import pytest
import torch
from llamas import HEAD_DIM, OWN_PLAN, CountingAttention, as_one_process, close, make
from torch import nn
from torch.distributed import get_rank, group

from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pg_manager import ModuleWrapper
from scaletorch.parallel.placement import Cut
from scaletorch.parallel.tensor_parallel import (
    ColumnParallelLinear,
    Divide,
    apply_tensor_parallel,
    gather_state_dict,
    gather_tensors,
    load_full_state_dict,
    shard_dims,
    split_by_owner,
    take_own,
)
from scaletorch.parallel.tensor_parallel.plans.resolve import resolve


def sizes_and_parts(options, plan=None, asynchronous=False):
    """Train as one process does; return the heads here, and the gradients of keys by owner."""
    model, grads = as_one_process(options, plan, asynchronous=asynchronous)
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
        (1, 6, 2, [[6, 2]]),
    ],
)
def test_heads_that_do_not_divide_train_as_one_process(tp, heads, kv_heads, expected):
    results = run_ranks(sizes_and_parts, tp, {"heads": heads, "kv_heads": kv_heads})
    assert [sizes for sizes, _ in results] == expected
    held = {}
    for _, parts in results:  # replicas have the same bits
        for key, grad in parts.items():
            assert torch.equal(grad, held.setdefault(key, grad))


@distributed_test(world_size=4)
def test_a_plan_of_ones_own_is_cut_at_heads_too():
    """Counts are divided where a plan says so; projections are cut at heads in any case."""
    for kv_heads in (6, 3):
        options = {"kv_heads": kv_heads, "attention": CountingAttention}
        as_one_process(options, OWN_PLAN, asynchronous=True)
    plan = {name: style for name, style in OWN_PLAN.items() if name != "**.self_attn"}
    as_one_process({"kv_heads": 2}, plan)


def test_a_vocabulary_of_50257():
    options = {"vocab": 50257, "hidden": 2, "inner": 4, "heads": 4, "kv_heads": 4, "tied": True}
    run_ranks(sizes_and_parts, 4, options)


def round_trip(state, options):
    """Load a whole state into another model and give it back."""
    model = ModuleWrapper(apply_tensor_parallel(make(seed=1, **options), group=group.WORLD))
    load_full_state_dict(model, state)
    own = {name: take_own(model, name, whole) for name, whole in state.items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(own[name], parameter), name
    assert set(shard_dims(model)) == set(own)
    with pytest.raises(ValueError, match=r"has shape \(1, 10\), but the whole has 8 along dim 0"):
        take_own(model, "layers.0.self_attn.k_proj.weight", torch.ones(1, 10))
    return gather_state_dict(copy.deepcopy(model))


def test_state_goes_round_uneven_sizes_bit_for_bit():
    options = {"heads": 6, "kv_heads": 2}
    plain = state = make(**options).state_dict()
    for tp in (4, 3, 2):
        results = run_ranks(round_trip, tp, state, options)
        state = results[-1]
        for result in results:
            assert list(result) == list(plain)
            assert all(torch.equal(result[n], t) for n, t in plain.items())


def replicas_step():
    """Adam on replicas: their states stay equal, and are gathered once."""
    model = apply_tensor_parallel(make(heads=4, kv_heads=1).float(), group=group.WORLD)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for seed in range(3):
        torch.manual_seed(seed)
        model(torch.randint(0, 13, (2, 5))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    name = "layers.0.self_attn.v_proj.weight"
    weight = model.get_parameter(name)
    state = optimizer.state[weight]["exp_avg"]
    assert torch.equal(gather_tensors(model, {name: state})[name], state)
    return weight.detach(), state


def test_replicas_stay_bitwise_equal():
    first, *others = run_ranks(replicas_step, 4)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


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


def values(model, plan, tp, name):
    resolved = resolve(model, plan, tp)
    return resolved.attributes[model.layers[0].self_attn].get(name)


def test_attributes_follow_the_heads_by_their_meaning():
    plain = make(heads=6, kv_heads=2)
    assert values(plain, None, 4, "num_key_value_groups") == (2, 1, 2, 1)
    assert values(plain, None, 4, "head_dim") is None
    counting = make(heads=8, kv_heads=2, attention=CountingAttention)
    assert values(counting, OWN_PLAN, 4, "num_heads") == (2, 2, 2, 2)
    assert values(counting, OWN_PLAN, 4, "num_kv_heads") == (1, 1, 1, 1)
    assert values(counting, OWN_PLAN, 4, "width") == (8, 8, 8, 8)
    # 4 heads of 4 over 3 ranks: as a count and as the length of the one key/value head.
    same = make(heads=4, kv_heads=1, attention=CountingAttention)
    same.layers[0].self_attn.width = 4
    assert values(same, OWN_PLAN, 3, "num_heads") == (2, 1, 1)
    assert values(same, OWN_PLAN, 3, "width") == (4, 4, 4)


@pytest.mark.parametrize(
    ("options", "tp", "texts"),
    [
        ({"heads": 6}, 7, ["query heads of layers.0.self_attn = 6", "sizes up to 6 are legal"]),
        ({"vocab": 4}, 5, ["embed_tokens.num_embeddings = 4", "sizes up to 4 are legal"]),
        ({"inner": 3}, 4, ["mlp.gate_proj.out_features = 3", "and 2 more", "up to 3"]),
    ],
)
def test_what_leaves_a_rank_nothing_names_what_would_do(options, tp, texts):
    with pytest.raises(ValueError, match=f"tp = {tp} leaves ranks without a share of") as caught:
        resolve(make(**options), None, tp)
    for text in texts:
        assert text in str(caught.value)


def test_projections_that_do_not_fit_together_must_divide():
    plan = {"**.self_attn.q_proj": "column"}
    with pytest.raises(ValueError, match=r"tp = 5 does not divide .*q_proj.out_features = 24"):
        resolve(make(), plan, 5)
    attribute = {"layers.0": Divide("count")}
    model = make()
    model.layers[0].count = 6
    with pytest.raises(ValueError, match=r"tp = 4 does not divide layers.0.count = 6; .* 3 and 6"):
        resolve(model, attribute, 4)
    both = attribute | {"embed_tokens": "vocab"}
    with pytest.raises(ValueError, match=r"count = 6 and leaves ranks .* sizes are 6$"):
        resolve(model, both, 14)


def test_a_tie_of_unlike_cuts_is_refused():
    model = make(heads=6, kv_heads=6, hidden=24)
    model.layers[0].mlp.down_proj = nn.Linear(24, 24, bias=False)
    model.layers[0].mlp.down_proj.weight = model.layers[0].self_attn.o_proj.weight
    with pytest.raises(ValueError, match=r"tied parameter.* into 8, 8, 4, 4 .* into 6, 6, 6, 6"):
        resolve(model, None, 4)


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

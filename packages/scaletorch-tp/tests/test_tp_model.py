"""Whole models: every layout trains as one process does."""

import copy

import pytest
import torch
from llamas import (
    OWN_PLAN,
    CausalLM,
    CountingAttention,
    as_one_process,
    make,
    train,
    whole_names,
)
from torch import nn
from torch.distributed import group

from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pg_manager import ModuleWrapper
from scaletorch.parallel.tensor_parallel import (
    Divide,
    apply_tensor_parallel,
    gather_state_dict,
    gather_tensors,
    shard_dims,
)

MODELS = [
    {"heads": 8, "kv_heads": 4, "attention": CountingAttention, "norm": nn.Identity},
    {"tied": True, "kv_heads": 2},
    {"kind": CausalLM, "heads": 8, "kv_heads": 4},
    {"kind": CausalLM, "tied": True, "biases": (False, False)},
    {"recompute": "reentrant", "tied": True},
    {"recompute": "non-reentrant", "tied": True},
]


def every_model():
    for options in MODELS:
        as_one_process(options, OWN_PLAN if "attention" in options else None)
    as_one_process(MODELS[0], OWN_PLAN, asynchronous=True)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_trains_as_one_process(tp):
    run_ranks(every_model, tp)


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
    model = apply_tensor_parallel(make(tied=True), group=group.WORLD)
    for _ in range(3):
        model.zero_grad()
        train(model)
    return {name: model.get_parameter(name).detach() for name in whole_names(model)}


def test_replicated_parameters_stay_bitwise_equal():
    first, *others = run_ranks(replicas_agree, 4)
    assert set(first) >= {"norm.weight", "layers.0.input_layernorm.weight"}
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def by_own_plan():
    plan = {
        "**.self_attn": Divide("num_heads", "num_kv_heads", "width"),
        "layers.*.self_attn.?_proj": "column",
        "layers.*.mlp.gate_proj": "column",
        "layers.*.mlp.up_proj": "column",
        "layers.*.mlp.down_proj": "row",
        "**.norm": "replicate",
    }
    model = make(attention=CountingAttention)
    with pytest.raises(ValueError, match="expected an input") as caught:
        # o_proj is column parallel here: its input is a shard, which is not its whole input.
        apply_tensor_parallel(model, plan, group.WORLD)(torch.arange(14).view(2, 7) % 13)
    return str(caught.value)


def test_a_plan_that_does_not_compose_is_an_error_of_the_layer():
    for rank, message in enumerate(run_ranks(by_own_plan, 2)):
        assert f"rank {rank}" in message
        assert "last dim 24" in message
        assert "(2, 7, 12)" in message


@distributed_test(world_size=2)
def test_state_is_seen_through_a_wrapper():
    plain = make(tied=True)
    model = ModuleWrapper(apply_tensor_parallel(copy.deepcopy(plain), group=group.WORLD))
    assert shard_dims(model) == shard_dims(model.module)
    assert shard_dims(model)["layers.0.self_attn.o_proj.weight"] == 1
    assert shard_dims(model)["lm_head.weight"] == 0
    state = gather_state_dict(model)
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())

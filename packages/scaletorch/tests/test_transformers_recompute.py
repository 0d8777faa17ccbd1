"""Layers that transformers recomputes itself train on every axis as in one process."""

import math

import pytest
import torch
import torch.nn.functional as F
from sweeps import today

from scaletorch.compose import full_gradients, parallelize, shard_global_batch, train_step
from scaletorch.dist.testing import preload, relative_error, run_ranks, worst
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
}  # fmt: skip
SHARED = {"sequence_parallel": True, "loss_parallel": True}
LAYOUTS = {
    "tp": ({"tp_size": 2}, {}),
    "sequence": ({"tp_size": 2}, SHARED),
    "cp": ({"cp_size": 2}, {}),
    "pp": ({"pp_size": 2}, {}),
    "pp late": ({"pp_size": 2}, {"schedule": "zb_h1"}),  # weight gradients come later
    "dp": ({"dp_size": 2}, {}),
}
WAYS = [(reentrant, before) for reentrant in (True, False) for before in (True, False)]
FAMILIES = {"Llama": WAYS, "Qwen2": [(True, False), (False, True)]}


@pytest.fixture(autouse=True, scope="module")
def _models_in_the_server():
    preload("transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2")


def built(family):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES)
    return getattr(transformers, f"{family}ForCausalLM")(config).double().train()


def batch():
    tokens = torch.randint(24, (4, 9), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].clone()
    labels[1, 3:], labels[3, :2] = -100, -100
    return {"input_ids": tokens[:, :-1], "labels": labels}


def recompute(model, reentrant):
    """Turn it on by the name that the installed version has, the newer one first."""
    old = model.gradient_checkpointing_enable
    getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": reentrant})


def step(family, manager, options, way):
    """Return loss and gradients, and how often layers of this rank were called."""
    model, calls = built(family), []
    for layer in model.model.layers:
        # The second run ends, without this module's output, once all that it kept is there again.
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    reentrant, before = way or (None, None)
    if way and before:
        recompute(model, reentrant)
    parallel = parallelize(model, manager, **options, rehearse=False)
    if way and not before:
        recompute(parallel, reentrant)
    train_step(parallel, shard_global_batch(batch(), 2, model=parallel))  # the first step looks on
    parallel.reset()
    calls.clear()
    loss = train_step(parallel, shard_global_batch(batch(), 2, model=parallel))
    return loss, full_gradients(parallel), len(calls)


def compare(sizes, options):
    """Return the largest errors of each family and way beside one process."""
    manager = setup_process_group_manager(**sizes)
    found = {}
    for family, ways in FAMILIES.items():
        plain, whole = built(family), batch()
        logits = plain(whole["input_ids"], use_cache=False).logits
        expected = F.cross_entropy(logits.flatten(0, 1), whole["labels"].flatten())
        expected.backward()
        kept = step(family, manager, options, None)[2]
        for way in ways:
            loss, gradients, calls = step(family, manager, options, way)
            errors = [relative_error(gradients[n], p.grad) for n, p in plain.named_parameters()]
            found[family, way] = worst([relative_error(loss, expected.detach()), *errors])
            assert calls == 2 * kept > 0, (family, way, calls, kept)  # each layer ran again
    destroy_process_group_manager()
    return found


@pytest.mark.parametrize("layout", today([*LAYOUTS], 6))
def test_every_axis_trains_as_one_process(layout):
    sizes, options = LAYOUTS[layout]
    for found in run_ranks(compare, math.prod(sizes.values()), sizes, options):
        assert worst(found.values()) < 1e-12, found

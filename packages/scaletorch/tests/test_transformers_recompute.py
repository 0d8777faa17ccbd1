"""Layers that are computed again train on every axis as in one process, without their cache.

By transformers' own recomputation, or by ours; the config of each model keeps a cache.
"""

import math

import pytest
import torch.nn.functional as F
from sweeps import today
from tiny_transformers import tiny
from training import grid, tokens

from scaletorch.compose import full_gradients, parallelize, shard_global_batch, train_step
from scaletorch.dist.testing import preload, relative_error, run_ranks, worst

pytest.importorskip("transformers")
FAMILIES = ("llama", "qwen2", "mixtral", "gpt2")
preload(*(f"transformers.models.{name}.modeling_{name}" for name in FAMILIES))

SHARED = {"sequence_parallel": True, "loss_parallel": True}
LAYOUTS = {
    "tp": ({"tp_size": 2}, {}),
    "sequence": ({"tp_size": 2}, SHARED),
    "cp": ({"cp_size": 2}, {}),
    "pp": ({"pp_size": 2}, {}),
    "pp late": ({"pp_size": 2}, {"schedule": "zb_h1"}),  # weight gradients come later
    "dp": ({"dp_size": 2}, {}),
}
# Whether transformers recomputes reentrantly, and whether it is asked before `parallelize`.
WAYS = [(reentrant, before) for reentrant in (True, False) for before in (True, False)]
CASES = {"Llama": [*WAYS, "ours"], "Qwen2": [WAYS[1], WAYS[2]]}
PIPELINED = {"Mixtral": ["ours"], "GPT2": ["ours"]}  # beside these on a pipeline


def batch():
    whole = tokens(1)
    whole["labels"][1, 3:], whole["labels"][3, :2] = -100, -100
    return whole


def recompute(model, reentrant):
    """Turn it on by the name that the installed version has, the newer one first."""
    old = model.gradient_checkpointing_enable
    getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": reentrant})


def step(family, manager, options, way):
    """Return loss and gradients, and how often layers of this rank were called."""
    model, calls = tiny(family, exact=family == "Mixtral").train(), []
    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            # The second run ends, without its output, once all that it kept is there again.
            module.register_forward_pre_hook(lambda *_: calls.append(1))
    theirs = way not in (None, "ours")
    if theirs and way[1]:
        recompute(model, way[0])
    options = {**options, "recompute": way == "ours"}
    parallel = parallelize(model, manager, **options, rehearse=False)
    if theirs and not way[1]:
        recompute(parallel, way[0])
    train_step(parallel, shard_global_batch(batch(), 2, model=parallel))  # the first step looks on
    parallel.reset()
    calls.clear()
    loss = train_step(parallel, shard_global_batch(batch(), 2, model=parallel))
    assert model.config.use_cache  # nobody's config is changed
    return loss, full_gradients(parallel), len(calls)


def compare(sizes, options):
    """Return the largest errors of each family and way beside one process."""
    with grid(sizes) as manager:
        found = {}
        for family, ways in (CASES | (PIPELINED if "pp_size" in sizes else {})).items():
            plain, whole = tiny(family, exact=family == "Mixtral"), batch()
            logits = plain(whole["input_ids"], use_cache=False).logits
            expected = F.cross_entropy(logits.flatten(0, 1), whole["labels"].flatten())
            expected.backward()
            kept = step(family, manager, options, None)[2]
            for way in ways:
                loss, gradients, calls = step(family, manager, options, way)
                errors = [relative_error(gradients[n], p.grad) for n, p in plain.named_parameters()]
                found[family, way] = worst([relative_error(loss, expected.detach()), *errors])
                assert calls == 2 * kept > 0, (family, way, calls, kept)  # each layer ran again
    return found


@pytest.mark.parametrize("layout", today([*LAYOUTS], 6))
def test_every_axis_trains_as_one_process(layout):
    sizes, options = LAYOUTS[layout]
    for found in run_ranks(compare, math.prod(sizes.values()), sizes, options, timeout=200):
        assert worst(found.values()) < 1e-12, found

"""Norms of the heads: each rank sees a part of the activations, the gradient is whole."""

from contextlib import ExitStack
from unittest.mock import patch

import torch
from llamas import Attention, HeadNorm, as_one_process, loss_of, make, whole_names
from torch import nn
from torch.distributed import group

from scaletorch.dist import all_reduce
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.tensor_parallel import apply_tensor_parallel
from scaletorch.parallel.tensor_parallel.regions import replicas
from scaletorch.parallel.tensor_parallel.sharing import gradient_sums

SIZES = {"heads": 4, "kv_heads": 2, "norm": HeadNorm}


def made(**options):
    return make(**{**SIZES, **options})


VARIANTS = [
    (None, None, False),
    (None, "reentrant", False),
    (None, "non-reentrant", True),
    ("norms tied", "non-reentrant", True),
    ("norm frozen", "reentrant", True),
    ("norm frozen", None, False),
]


def gradients_of_norms():
    found = []
    for change, recompute, copied in VARIANTS:
        options = {**SIZES, "change": change, "recompute": recompute}
        model, grads = as_one_process(make(**options), copied=copied)
        norm, names = model.layers[0].self_attn.q_norm, [n for n in grads if "_norm" in n]
        assert type(norm) is HeadNorm
        assert type(norm.weight) is nn.Parameter
        assert {*names} <= {*whole_names(model)}
        found.append({name: grads[name] for name in names})
    return found


def test_the_gradient_is_one_process_s_and_alike_on_ranks():
    for (change, *_), first, second in zip(
        VARIANTS, *run_ranks(gradients_of_norms, 2), strict=True
    ):
        assert ("layers.0.self_attn.q_norm.weight" in first) == (change != "norm frozen")
        assert first
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_one_rank_leaves_the_module_alone():
    model = apply_tensor_parallel(made())
    assert type(model.layers[0].self_attn.q_norm) is HeadNorm
    assert type(model.layers[0].self_attn) is Attention


def dtypes_of_sums():
    """Return the dtypes in which gradients of norms and of replicated heads are summed."""
    model = apply_tensor_parallel(made().bfloat16(), group=group.WORLD)
    found = {}
    with ExitStack() as stack:
        for module in (gradient_sums, replicas):
            own = found[module.__name__.rpartition(".")[2]] = set()

            def noting(data, group, own=own):
                own.add(data.dtype)
                all_reduce(data, group=group)

            stack.enter_context(patch.object(module, "all_reduce", noting))
        loss_of(model, 1)[0].backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    return found


def test_gradients_of_16_bits_are_summed_in_float32():
    for found in run_ranks(dtypes_of_sums, 4):
        assert found == {"gradient_sums": {torch.float32}, "replicas": {torch.float32}}

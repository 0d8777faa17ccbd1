"""Losses of one's own with models of transformers: packed pairs, and a router's auxiliary loss."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from own_losses import drawn, log_prob, preferred, smoothed

from scaletorch.compose import full_gradients, parallelize, shard_global_batch, train_step
from scaletorch.dist.testing import preload, relative_error, run_ranks, worst
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(300)  # the first ranks import transformers

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False,
}  # fmt: skip
BOUNDS = torch.tensor((0, 5, 11, 12, 21))  # chosen, rejected, chosen, rejected


@pytest.fixture(scope="module", autouse=True)
def _imports():
    models = (f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mixtral"))
    preload("torch._dynamo", *models)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return drawn(LlamaForCausalLM(LlamaConfig(**SIZES)), 0)


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    asked = {"output_router_logits": True, "router_aux_loss_coef": 0.1, "num_local_experts": 4}
    model = drawn(MixtralForCausalLM(MixtralConfig(**SIZES, **asked)), 0)
    model.set_experts_implementation("eager")  # the other one takes no float64
    return model


def packed():
    """Return rows of four documents, with what each one is told apart by."""
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(32, (2, 4, 21), generator=generator).unbind()
    labels[:, BOUNDS[1:] - 1] = -100
    positions = torch.arange(21) - BOUNDS[:-1].repeat_interleave(BOUNDS.diff())
    told = {"position_ids": positions.expand(ids.shape), "cu_seq_lens_q": BOUNDS}
    return {"input_ids": ids, "labels": labels, **told}


def preferring(output, batch):
    found = log_prob(output, batch)
    return preferred(found), found.numel() // 2


def pairs_packed(batch):
    return 2 * len(batch["input_ids"])


def one_step(sizes, options, build, whole, loss_fn, count_fn, micro_batches):
    manager = setup_process_group_manager(**sizes)
    model = parallelize(build(), manager, **options, rehearse=False)
    parts = shard_global_batch(whole, micro_batches, model=model)
    loss = train_step(model, parts, loss_fn=loss_fn, count_fn=count_fn)
    gradients = full_gradients(model)
    destroy_process_group_manager()
    return loss.item(), gradients


def compare(model, loss, results, bound=1e-11):
    loss.backward()
    known = {name: p.grad for name, p in model.named_parameters()}
    for found, gradients in results:
        assert found == pytest.approx(loss.item(), rel=bound)
        errors = [relative_error(gradients[n], g) for n, g in known.items()]
        assert worst(errors) < bound, errors


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"cp_size": 2}, {}),
        ({"tp_size": 2, "cp_size": 2, "pp_size": 2}, {"loss_parallel": True}),
    ],
)
def test_packed_pairs(sizes, options):
    model, whole = llama(), packed()
    sums = []
    for row, labels in zip(whole["input_ids"], whole["labels"], strict=True):
        for start, end in pairwise(BOUNDS):
            logits = model(input_ids=row[None, start:end]).logits[0]
            targets = labels[start:end]
            sums.append(-F.cross_entropy(logits, targets, reduction="sum"))
    chosen, rejected = torch.stack(sums).view(-1, 2).unbind(-1)
    loss = -F.logsigmoid(chosen - rejected).mean()
    arguments = sizes, options, llama, whole, preferring, pairs_packed, 2
    compare(model, loss, run_ranks(one_step, math.prod(sizes.values()), *arguments))


def test_a_router_s_loss_is_added():
    model, generator = mixtral(), torch.Generator().manual_seed(4)
    ids, labels = torch.randint(32, (2, 4, 12), generator=generator).unbind()
    whole = {"input_ids": ids, "labels": labels}
    output = model(**{"input_ids": ids, "output_router_logits": True})
    flat = output.logits.flatten(0, 1)
    loss = F.cross_entropy(flat, labels.flatten(), label_smoothing=0.1) + 0.1 * output.aux_loss
    arguments = {"dp_size": 2}, {}, mixtral, whole, smoothed, None, 1
    compare(model, loss, run_ranks(one_step, 2, *arguments), 1e-6)  # it routes in float32

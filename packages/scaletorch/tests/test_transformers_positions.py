"""Models of transformers that count from elsewhere, or add a loss of their own; and mixtures."""

import re

import pytest
import torch
import torch.nn.functional as F

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist.errors import ScaletorchError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(300)  # each rank imports transformers

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,  # the usual one leaves attention nearly uniform
}
DROPS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def roberta(**options):
    from transformers import RobertaConfig, RobertaForMaskedLM

    torch.manual_seed(0)
    config = RobertaConfig(**SIZES, **DROPS, max_position_embeddings=40, pad_token_id=1, **options)
    return RobertaForMaskedLM(config).double()


def mixture(dtype=torch.float64, **options):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    heads = {"num_key_value_heads": 2, "head_dim": 8, "use_cache": False}
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**SIZES, **heads, **experts, **options)
    return Qwen3MoeForCausalLM._from_config(config, experts_implementation="eager").to(dtype)


def half_mixture():
    return mixture(torch.bfloat16)


def mixture_with_router_loss():
    return mixture(output_router_logits=True, router_aux_loss_coef=0.5)


def global_batch(**others):
    tokens = torch.randint(3, 64, (4, 17), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].clone()
    labels[0, 5:] = -100
    return {"input_ids": tokens[:, :-1], "labels": labels, **others}


OFFSET = {"position_ids": torch.arange(2, 18).expand(4, 16)}


def step(build, sizes, others, options):
    """Return how far a step is from one process's, or what is said of it."""
    manager = setup_process_group_manager(**sizes)
    batch = global_batch()
    try:
        model = parallelize(build(), manager, **options, rehearse=False)
        layout = {"model": model} if "cp_layout" in options else {}
        shards = shard_global_batch(global_batch(**others), 1, manager, **layout)
        loss = train_step(model, shards, manager)
    except ScaletorchError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        destroy_process_group_manager()
    plain = build()
    logits = plain(batch["input_ids"]).logits
    expected = F.cross_entropy(logits.flatten(0, 1).to(loss.dtype), batch["labels"].flatten())
    return abs(loss.item() - expected.item()) / expected.item()


DP, CP, CONTIGUOUS = {"dp_size": 2}, {"cp_size": 2}, {"cp_layout": "contiguous"}
CASES = [
    (roberta, DP, {}, {}, 1e-12),
    (roberta, CP, OFFSET, CONTIGUOUS, 1e-12),
    (roberta, CP, {}, {}, "counts its positions from its padding index on"),
    (roberta, {"tp_size": 2}, {}, {"sequence_parallel": True}, 1e-12),  # of ids, which are whole
    (mixture, CP, {}, {}, 1e-6),  # its router computes in float32
    (half_mixture, CP, {}, {}, 5e-2),
    (mixture_with_router_loss, {"pp_size": 2}, {}, {}, "router_aux_loss_coef=0.5.*means over all"),
]


def steps():
    return [step(*case[:-1]) for case in CASES]


def test_positions_from_elsewhere_and_losses_beside():
    for rank, found in enumerate(run_ranks(steps, 2, timeout=250)):
        for case, said in zip(CASES, found, strict=True):
            if isinstance(case[-1], str):
                assert re.search(case[-1], str(said), re.DOTALL), (rank, case, said)
            else:
                assert not isinstance(said, str), (rank, case, said)
                assert said < case[-1], (rank, case, said)

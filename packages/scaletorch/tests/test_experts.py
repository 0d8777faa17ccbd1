"""Mixtures of experts on every layout: losses, gradients, norms and steps of one process."""

from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from exactly import compute_exactly
from sweeps import today
from torch import nn
from training import adamw, in_one_process, ranks_of, train_and_compare

from scaletorch.compose.experts import settle_tokens
from scaletorch.dist import RankFailedError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.expert_parallel import apply_expert_parallel
from scaletorch.parallel.pipeline_parallel import SCHEDULES
from scaletorch.parallel.tensor_parallel import Slices, Stacked
from scaletorch.parallel.tensor_parallel.building import WholeSequence

transformers = pytest.importorskip("transformers")

STEPS, BOUND = 2, 1e-11
SMALL = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "num_experts_per_tok": 2, "attn_implementation": "eager",
    "pad_token_id": None, "use_cache": False,
}  # fmt: skip
# What 8 ranks can share, on any axis; the layers are as many as a pipeline's stages.
WIDE = {
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4, "moe_intermediate_size": 16,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8,
}  # fmt: skip
SHARED = {
    "n_routed_experts": 8, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
FAMILIES = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "decoder_sparse_step": 1, "norm_topk_prob": True},
    "Olmoe": {"num_experts": 4, "num_key_value_heads": 4},
    "DeepseekV3": {
        **SHARED, "n_group": 2, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 8, "head_dim": 4, "num_key_value_heads": 4,
    },
    "GptOss": {"num_local_experts": 4, "sliding_window": 4},
    "Glm4Moe": {**SHARED, "n_group": 1},
}  # fmt: skip


def build(family, layers=0, skewed=False, **options):
    """A tiny model in float64, whose router's choices are far apart.

    With `layers` it is one for 8 ranks. Skewed, one expert gets all tokens and another none.
    """
    torch.manual_seed(1)
    options = {**(WIDE | {"num_hidden_layers": layers} if layers else {}), **options}
    kind = getattr(transformers, f"{family}Config")
    config = kind(**{**SMALL, **FAMILIES[family], **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config).double()
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2, generator=generator)
        elif "bias" in name or "sinks" in name:
            nn.init.normal_(parameter, std=0.1, generator=generator)
    for name, bias in model.named_buffers():
        if skewed and name.endswith("e_score_correction_bias"):
            bias[0], bias[-1] = 50, -50
    return compute_exactly(model)


def batch(step, layers=0):
    generator = torch.Generator().manual_seed(100 + step)
    shape = (16, 16) if layers else (8, 12)
    ids = torch.randint(0, 40, shape, generator=generator)
    labels = torch.randint(0, 40, shape, generator=generator)
    labels[step % 8, 3:] = -100
    return {"input_ids": ids, "labels": labels}


@cache
def reference(family, layers=0, skewed=False):
    """Figures of one process."""
    batches = [batch(step, layers) for step in range(STEPS)]
    return in_one_process(build(family, layers, skewed), batches, adamw, clip=0.3)


def trained(ranks, family, sizes, options=None, micro_batches=1, stage=0, layers=0, skewed=False):
    """Train on ranks, and compare all with one process."""
    assert ranks == ranks_of(sizes)
    train_and_compare(
        reference(family, layers, skewed),
        partial(build, family, layers, skewed),
        sizes,
        [batch(step, layers) for step in range(STEPS)],
        adamw,
        options=options, micro_batches=micro_batches, stage=stage, clip=0.3,
        bounds={"weights": 1e-9},
    )  # fmt: skip


SEQUENCES, RECOMPUTED = {"sequence_parallel": True}, {"recompute": True}
NAMED = {"plan": {"**.mlp.experts": Stacked({"gate_up_proj": Slices(1, packed=2), "down_proj": 2})}}
DP_TP, CP_TP = {"dp_size": 2, "tp_size": 2}, {"cp_size": 2, "tp_size": 2}
BOTH = {"ep_size": 2, "etp_size": 2}  # each expert's width is divided too
# Family, sizes, options of `parallelize`, micro-batches, ZeRO stage.
CASES = [
    *((family, {"dp_size": 4, "ep_size": 2}, {}, 1, 0) for family in FAMILIES),
    *((family, DP_TP | BOTH, {}, 1, 0) for family in FAMILIES),
    ("Qwen3Moe", {"dp_size": 4, "ep_size": 4}, {}, 2, 0),
    ("Qwen3Moe", DP_TP | {"ep_size": 2}, {}, 1, 0),
    ("Qwen3Moe", DP_TP | {"ep_size": 4}, {}, 1, 0),
    ("Qwen3Moe", DP_TP | {"ep_size": 4}, SEQUENCES, 1, 1),
    ("Qwen3Moe", {"dp_size": 2, "cp_size": 2, "ep_size": 4}, {}, 1, 2),
    ("Qwen3Moe", {"dp_size": 2, "pp_size": 2, "ep_size": 2}, RECOMPUTED, 2, 1),
    ("Qwen3Moe", CP_TP | {"ep_size": 2}, {}, 1, 0),
    ("Qwen3Moe", CP_TP | BOTH, {}, 1, 0),
    ("Qwen3Moe", {"tp_size": 4}, SEQUENCES, 2, 0),
    ("Qwen3Moe", {"pp_size": 2, "tp_size": 2}, RECOMPUTED, 2, 0),
    ("Qwen3Moe", DP_TP | {"etp_size": 1}, {}, 1, 2),
    ("GptOss", {"tp_size": 4}, {}, 1, 0),
    ("GptOss", DP_TP | {"ep_size": 2}, {}, 1, 0),
    ("GptOss", DP_TP | {"ep_size": 4}, SEQUENCES, 1, 1),
    ("GptOss", DP_TP | BOTH, SEQUENCES, 1, 1),
    ("GptOss", DP_TP | {"etp_size": 1}, SEQUENCES, 1, 0),
    ("DeepseekV3", DP_TP | BOTH, SEQUENCES, 2, 2),
    ("Mixtral", DP_TP, RECOMPUTED | SEQUENCES, 1, 2),
    ("Mixtral", DP_TP | BOTH, NAMED, 1, 0),
    ("Mixtral", DP_TP | {"ep_size": 4}, NAMED, 1, 0),
    ("Mixtral", DP_TP | {"etp_size": 1}, NAMED, 2, 1),
]


@pytest.mark.parametrize(("family", "sizes", "options", "micro_batches", "stage"), today(CASES, 11))
def test_four_ranks_train_as_one_process(family, sizes, options, micro_batches, stage):
    trained(4, family, sizes, options, micro_batches, stage)


def _settled(etp_size):
    """Return whether tp ranks share the tokens of experts in blocks that see whole sequences."""
    world = torch.distributed.group.WORLD
    model = apply_expert_parallel(build("Mixtral"), None, world, sequence_parallel=True)
    first, second = (layer.mlp for layer in model.model.layers)
    first.__class__ = type("Whole", (WholeSequence, type(first)), {})
    settle_tokens(model, SimpleNamespace(etp_size=etp_size, tp_group=world))
    return [block.experts._division.tokens is world for block in (first, second)]


def test_tp_ranks_share_tokens_in_blocks_that_see_whole_sequences():
    assert run_ranks(_settled, 2, 1) == [[True, False]] * 2


def test_experts_that_would_miss_tokens_are_refused():
    with pytest.raises(RankFailedError, match=r"are not cut over tp.*take etp = 1"):
        run_ranks(_settled, 2, 2)


AXES = ("dp", "pp", "cp", "tp", "ep", "etp")
# Layout, family, options of `parallelize`, micro-batches, ZeRO stage, whether one expert gets all.
EIGHT = [
    ("8x1x1x1-8-1", "Olmoe", {}, 2, 2, False),
    ("2x1x2x2-8-1", "Qwen3Moe", SEQUENCES, 1, 1, False),
    ("2x1x2x2-2-2", "Glm4Moe", RECOMPUTED, 1, 1, True),
    ("2x2x1x2-4-1", "DeepseekV3", {"schedule": "dualpipe_v"}, 4, 0, True),
    ("2x2x2x1-2-1", "Mixtral", {"schedule": "zb_h1"}, 2, 1, False),
    ("1x2x1x4-1-1", "GptOss", {"schedule": "interleaved_1f1b"}, 2, 0, False),
    ("1x4x1x2-2-1", "DeepseekV3", RECOMPUTED, 2, 2, False),
    ("2x1x1x4-2-4", "GptOss", SEQUENCES, 1, 2, False),
]


@pytest.mark.parametrize(
    ("layout", "family", "options", "micro_batches", "stage", "skewed"), today(EIGHT, 8)
)
def test_eight_ranks_train_as_one_process(layout, family, options, micro_batches, stage, skewed):
    numbers = dict(zip(AXES, map(int, layout.replace("x", "-").split("-")), strict=True))
    sizes = {f"{axis}_size": size for axis, size in numbers.items()}
    schedule = SCHEDULES[options.get("schedule", "1f1b")]
    layers = max(2, schedule(numbers["pp"], micro_batches).num_stages)
    trained(8, family, sizes, options, micro_batches, stage, layers, skewed)

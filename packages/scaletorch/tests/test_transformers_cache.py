"""Models whose config keeps a cache of keys and values train as without one."""

from functools import partial

import pytest
import torch
from training import in_one_process, on_a_layout, require_alike

from scaletorch.dist.testing import preload, run_ranks

transformers = pytest.importorskip("transformers")
preload("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2")

SIZES = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": None,
}  # fmt: skip
GPT2 = {"vocab_size": 24, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0,
        "eos_token_id": 1, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}  # fmt: skip


def built(family):
    torch.manual_seed(4)
    sizes = GPT2 if family == "GPT2" else SIZES
    eager = {"attn_implementation": "eager"} if family == "Mixtral" else {}
    config = getattr(transformers, f"{family}Config")(**sizes, **eager, use_cache=True)
    kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, kind)(config).double()
    if family == "Mixtral":
        model.set_experts_implementation("eager")
    return model


def train(cases):
    for family, sizes, options in cases:
        plain = built(family)
        plain.forward = partial(plain.forward, use_cache=False)
        expected = in_one_process(plain, [batch()])
        build = partial(built, family)
        found = on_a_layout(build, sizes, [batch()], options=options, micro_batches=2)
        # Parts of some are computed in float32.
        require_alike(found, expected, 1e-6, losses=1e-12)
        assert plain.config.use_cache  # nobody's config is changed


def batch():
    tokens = torch.randint(24, (4, 9), generator=torch.Generator().manual_seed(5))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}


RECOMPUTED = {"recompute": True}
CASES = [
    ("Mixtral", {"pp_size": 2}, RECOMPUTED),
    ("Llama", {"pp_size": 2}, RECOMPUTED),
    ("GPT2", {"pp_size": 2}, RECOMPUTED),
    ("Llama", {"cp_size": 2}, RECOMPUTED),
    ("Llama", {"tp_size": 2}, {"sequence_parallel": True, **RECOMPUTED}),
    ("Llama", {"dp_size": 2}, {}),
]


def test_every_layout_trains_without_the_cache():
    run_ranks(train, 2, CASES)

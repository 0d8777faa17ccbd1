"""Tiny models of transformers with random weights, in float64 and the same on every rank."""

from __future__ import annotations

import torch
from exactly import compute_exactly
from torch import nn

SIZES = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.3,  # the usual one leaves attention nearly uniform
}  # fmt: skip
GPT2 = {
    "vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.3,
    **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
}  # fmt: skip


def tiny(family: str, kind: str = "ForCausalLM", *, exact: bool = False, **options) -> nn.Module:
    """Return a tiny model; `exact` lets it compute in float64 where it asks for float32."""
    import transformers

    torch.manual_seed(1)
    sizes, kind = (GPT2, "LMHeadModel") if family == "GPT2" else (SIZES, kind)
    config = getattr(transformers, f"{family}Config")(**{**sizes, **options})
    model = getattr(transformers, f"{family.removesuffix('Text')}{kind}")(config).double()
    if getattr(config, "num_experts_per_tok", None):
        model.set_experts_implementation("eager")  # others have no float64
    return compute_exactly(model) if exact else model

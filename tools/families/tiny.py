"""A tiny configuration of a transformers class: its own fields, with small numbers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

VOCABULARY, LENGTH, LAYERS = 64, 16, 2

# Field -> its value, regardless of the default.
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("hidden_size_global", "adapter_in_dim", "adapter_out_dim"), 32),
    **dict.fromkeys(("adapter_input_size",), 32),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("embedding_dim", "ple_embed_dim", "lru_width", "backbone_hidden_size"), 32),
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "n_ctx"), VOCABULARY),
    **dict.fromkeys(("vocab_size_per_layer_input",), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), VOCABULARY),
    **dict.fromkeys(("max_target_positions", "max_source_positions", "context_length"), VOCABULARY),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "ffn_dim", "dim_ff", "dff"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "d_inner", "feed_forward_size"), 48),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_blocks"), LAYERS),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_kv_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("swa_num_attention_heads", "linear_num_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("n_mamba_heads", "index_n_heads", "gated_norm_rank"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "dim_head", "d_head"), 8),
    **dict.fromkeys(("v_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_head_dim", "attention_head_size", "index_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "d_rel"), 4),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "hc_lowrank"), 12),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("shared_experts_intermediate_size", "router_hidden_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "laurel_rank", "adapter_rank"), 16),
    **dict.fromkeys(("n_group", "o_groups"), 2),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("moe_layer_start_index", "zero_expert_num"), 1),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "time_step_rank"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "block_size", "index_topk"), 4),
    **dict.fromkeys(("mamba_dt_rank", "max_window_layers", "index_topk_blocks"), 2),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("hidden_size_per_layer_input", "pronunciation_embed_dim"), 8),
    **dict.fromkeys(("shape_embed_dim", "image_size", "index_block_size", "prompt_length"), 8),
    **dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size", "rel_extent"), 64),
    **dict.fromkeys(("projection_dim", "out_hidden_size", "output_dim"), 32),
    **dict.fromkeys(("patch_size", "attn_layer_period", "num_centroids"), 2),
    **dict.fromkeys(("query_pre_attn_scalar", "window_size"), 8),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
    "mamba_d_ssm": 64,
    "altup_num_inputs": 2,
    "num_kv_shared_layers": 0,
    "num_experts_per_layer": 4,
    "is_decoder": True,
    "use_cache": False,
    "use_mamba_kernels": False,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    "interleave_moe_layer_step": 1,
}

# Field -> its value if the default is an int: a window of more than half of the length.
WINDOWS: Mapping[str, Any] = {
    **dict.fromkeys(("sliding_window", "sliding_window_size", "local_attention"), 9),
    **dict.fromkeys(("attention_window_size", "attention_chunk_size", "keep_window_size"), 9),
    "original_max_position_embeddings": VOCABULARY,
}

# Fields with the kind of each layer.
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "indexer_types")

_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}

# Model type -> fields that differ from the rules above.
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3]},
    "cohere_compass_text": {
        "rope_parameters": {kind: dict(_ROPE) for kind in ("sliding_attention", "full_attention")},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "dots3_note_text": {
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
        **dict.fromkeys(("swa_qk_nope_head_dim", "swa_qk_rope_head_dim"), 4),
        **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank"), 12),
        **dict.fromkeys(("swa_head_dim", "swa_v_head_dim"), 8),
    },
    "dory": {
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 16},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "qwen4_exp_text": {
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 2,
        "split_ngram_parts": 2,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [16, 16],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "hash_seed": 1,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny(config_class: type, model_type: str = "") -> Any:
    """Return a configuration of this class whose model has some ten thousand parameters.

    Args:
        config_class: Class of transformers.
        model_type: Family, if it needs fields of its own (`OTHERS`).
    """
    default = config_class()
    made = vars(default)  # getattr would refuse fields that differ by layer
    given: dict[str, Any] = {}
    for name, own in _fields(config_class).items():
        value = _value(name, own, made.get(name))
        if value is not None:
            given[name] = value
    if "kv_lora_rank" in given:  # every head has its own keys
        given |= {name: 4 for name in ("num_key_value_heads", "head_dim") if name in given}
    _set_kinds({name: made.get(name) for name in _fields(config_class)}, given)
    return config_class(**{**given, **OTHERS.get(model_type, {})})


def _fields(config_class: type) -> dict[str, Any]:
    """Return the fields of a configuration and their defaults.

    They are dataclass fields, or in transformers 5.0 arguments of `__init__`.
    """
    if is_dataclass(config_class):
        return {field.name: field.default for field in fields(config_class)}
    arguments = inspect.signature(config_class).parameters.values()
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return {each.name: each.default for each in arguments if each.kind is kind}


def _value(name: str, default: Any, made: Any) -> Any:
    """Return the small value of a field, or None to leave it as it is.

    Args:
        name: Name of the field.
        default: Default of the class.
        made: Value in a default configuration.
    """
    if name in SIZES:
        return SIZES[name]
    if name in WINDOWS:
        return WINDOWS[name] if isinstance(made, int) else None
    if ("drop" in name or "jitter" in name) and isinstance(made, float):
        return 0.0
    if name.endswith(("_token_id", "_token_index")) and isinstance(made, int):
        return min(made, VOCABULARY - 1)
    if isinstance(default, type(None)) and is_config(made):
        return tiny(type(made), made.model_type)
    return None


def is_config(value: object) -> bool:
    """Return whether a value is a configuration of transformers."""
    return any(base.__name__ == "PreTrainedConfig" for base in type(value).__mro__)


def _set_kinds(made: Mapping[str, Any], given: dict[str, Any]) -> None:
    """Set the kinds of layers so that each kind of the default occurs, with two layers at least."""
    lists = {n: made[n] for n in KINDS if isinstance(made.get(n), list | tuple)}
    kinds = {name: list(dict.fromkeys(each)) for name, each in lists.items()}
    if not kinds:
        return
    layers = max(LAYERS, *map(len, kinds.values()))
    for name, each in kinds.items():
        given[name] = type(lists[name])(each[layer % len(each)] for layer in range(layers))
    given |= {n: layers for n in ("num_hidden_layers", "num_layers", "n_layer") if n in given}

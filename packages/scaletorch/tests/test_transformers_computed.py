"""Families of transformers whose attention cannot be divided along the sequence are refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as c10d
from refused_calls import require_words, words_of
from tiny_transformers import tiny

from scaletorch.dist.testing import preload, run_ranks
from scaletorch.parallel.context_parallel import ShardedSequences, apply_context_parallel

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(300)
LENGTH = 16
SIZES = {
    "n_embd": 32, "d_model": 32, "n_layer": 2, "n_layers": 2, "num_layers": 2, "n_head": 4,
    "n_heads": 4, "num_heads": 4, "is_decoder": True, "use_cache": False,
}  # fmt: skip
FAMILIES = {
    "Bloom": {},
    "OpenAIGPT": {"n_positions": 32},
    "DeepseekV32": {
        "num_key_value_heads": 4, "first_k_dense_replace": 2, "q_lora_rank": 8, "kv_lora_rank": 8,
        "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "index_n_heads": 2,
        "index_head_dim": 8, "index_topk": 4,
    },
    "Bart": {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
    "Doge": {},
    "Falcon": {"alibi": True, "new_decoder_architecture": False},
}  # fmt: skip


def _step(name):
    """Return a call that makes a family context parallel, and runs it."""

    def step(batch):
        kind = "LMHeadModel" if name == "OpenAIGPT" else "ForCausalLM"
        plain = tiny(name, kind, **SIZES | FAMILIES[name])
        model = apply_context_parallel(plain, c10d.group.WORLD, layout="contiguous")
        model(batch["input_ids"], position_ids=batch["position_ids"])

    return step


def _pools(_):
    apply_context_parallel(tiny("Llama", "ForSequenceClassification"), c10d.group.WORLD)


def _convolves(_):
    sizes = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "num_mel_bins": 8}
    speech = transformers.WhisperConfig(encoder_ffn_dim=16, max_source_positions=16, **sizes)
    encoder = transformers.models.whisper.modeling_whisper.WhisperEncoder(speech)
    apply_context_parallel(encoder, c10d.group.WORLD)


def _sees(batch):
    """Text goes through a model with a tower, and an image does not."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "intermediate_size": 16, "image_size": 8, "patch_size": 4}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision),
        text_config=tiny("Llama", use_cache=False).config,
        image_token_index=3,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    model = apply_context_parallel(model, c10d.group.WORLD, layout="contiguous")
    sequences = ShardedSequences(LENGTH, layout="contiguous", group=c10d.group.WORLD)
    mine = sequences.shard({"input_ids": torch.full((2, LENGTH), 5)})
    model(**mine)
    model(**mine, pixel_values=torch.ones(2, 3, 8, 8))


REFUSED = {
    _step("Bloom"): "BloomForCausalLM takes no position_ids",
    _step("OpenAIGPT"): "OpenAIGPTModel computes its attention itself",
    _step("DeepseekV32"): "has layers of indexed_attention",
    _step("Bart"): "BartForCausalLM takes no position_ids and would count its positions from 0",
    _step("Falcon"): "attn_mask must be None",
    _step("Doge"): "the model changes its attention mask by",
    _pools: "LlamaForSequenceClassification pools over the sequence",
    _convolves: "WhisperEncoder takes input_features, and cp divides the positions",
    _sees: "CLIPVisionModel is run, and text alone can be divided",
}


def _refuse():
    ids = torch.randint(3, 32, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    return words_of(REFUSED, {"input_ids": ids})


def test_what_would_be_of_a_shard_is_refused():
    preload("transformers")
    require_words(REFUSED, run_ranks(_refuse, 2, timeout=240))

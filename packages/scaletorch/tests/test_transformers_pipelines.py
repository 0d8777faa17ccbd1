"""Families whose forward does more than a list of layers: on two stages as in one process."""

import copy

import pytest
import torch
from torch import nn

from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.parallel.pipeline_parallel import (
    PipelineParallel,
    Split,
    StageError,
    train_step_pipeline,
)

pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(300)  # each rank imports transformers

WIDTH, VOCAB = 16, 32
USUAL = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "use_cache": False,
}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SHORT = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BART = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "pad_token_id": 0,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "use_cache": False,
}
DECODER = "model.decoder."
# What its code does; its classes' first words, its sizes, and its split.
FAMILIES = {
    "positions and masks of ids": ("Bert", {**USUAL, **QUIET}, "BertLMHeadModel", None),
    "positions by padding": (
        "Roberta",
        {**USUAL, **QUIET},
        "RobertaForCausalLM",
        Split(first=("roberta.embeddings",), layers="roberta.encoder.layer", last=("lm_head",)),
    ),
    "biases of lengths, layers that return tuples": (
        "Bloom",
        {**USUAL, "hidden_dropout": 0.0, "attention_dropout": 0.0, "n_layer": 2, "n_head": 2},
        "BloomForCausalLM",
        None,
    ),
    "logits scaled": (
        "Cohere",
        {**USUAL, "num_key_value_heads": 2, "logit_scale": 0.3},
        "CohereForCausalLM",
        None,
    ),
    "embeddings scaled, logits capped": (
        "Gemma2",
        {**USUAL, "num_key_value_heads": 2, "head_dim": 8, "attn_implementation": "eager"},
        "Gemma2ForCausalLM",
        None,
    ),
    "embeddings scaled in place": (
        "CTRL",
        {**SHORT, "dff": 24, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "use_cache": False},
        "CTRLLMHeadModel",
        None,
    ),
    "hidden states viewed as ids": (
        "OpenAIGPT",
        {**SHORT, **NO_DROPOUT},
        "OpenAIGPTLMHeadModel",
        None,
    ),
    "states beside hidden states": (
        "Rwkv",
        {**USUAL, "attention_hidden_size": WIDTH},
        "RwkvForCausalLM",
        None,
    ),
    "a norm registered after the layers": (
        "Bart",
        BART,
        "BartForCausalLM",
        Split(
            first=tuple(
                DECODER + name
                for name in ("embed_tokens", "embed_positions", "layernorm_embedding")
            ),
            layers=DECODER + "layers",
            last=("lm_head",),
        ),
    ),
}

BLT = {"hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": 2, "head_dim": 8,
       "num_key_value_heads": 2, "num_hidden_layers": 2, "dropout": 0.0,
       "max_position_embeddings": 32, "vocab_size": VOCAB,
       "hidden_size_global": WIDTH}  # fmt: skip
CPM_ANT = {"vocab_size": VOCAB, "hidden_size": WIDTH, "dim_ff": 24, "num_hidden_layers": 2,
           "num_attention_heads": 2, "dim_head": 8, "prompt_length": 3, "dropout_p": 0.0,
           "prompt_types": 4, "use_cache": False}  # fmt: skip
PROPHETNET = {**BART, "hidden_size": WIDTH, "num_decoder_layers": 2,
              "num_decoder_attention_heads": 2,
              "activation_dropout": 0.0, "attention_dropout": 0.0}  # fmt: skip
FAMILIES |= {
    "what is in a layer is asked for": (
        "Xmod",
        {**USUAL, **QUIET, "languages": ["en_XX", "de_DE"], "default_language": "en_XX"},
        "XmodForCausalLM",
        None,
    ),
    "the kind of attention changes in the first forward": (
        "BigBird",
        {**USUAL, **QUIET, "sep_token_id": 3},
        "BigBirdForCausalLM",
        None,
    ),
    "biases of integers, and prompts in front": ("CpmAnt", CPM_ANT, "CpmAntForCausalLM", None),
    "embeddings by a method": ("ProphetNet", PROPHETNET, "ProphetNetForCausalLM", None),
    "a list among others, and patches by a frozen module": (
        "Blt",
        {
            **{f"{part}_config": dict(BLT) for part in ("patcher", "encoder", "decoder", "global")},
            "encoder_hash_byte_group_vocab": 16,
            "encoder_hash_byte_group_size": [3],
            "vocab_size": VOCAB,
            "use_cache": False,
        },
        "BltForCausalLM",
        Split(
            first=("model.local_encoder", "model.encoder_hash_tok_embedding",
                   "model.global_transformer.token_embedding_projection"),
            layers="model.global_transformer.layers",
            last=("model.local_decoder", "lm_head"),
        ),
    ),
}  # fmt: skip


def build(name: str) -> nn.Module:
    import transformers

    word, sizes, model, _ = FAMILIES[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, f"{word}Config")(**sizes)).double()


def make_batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCAB, (2, 2, 7), generator=generator)
    tokens[0, 1, :2] = 0  # padding
    return [{"input_ids": t[:, :-1], "labels": t[:, 1:]} for t in tokens]


def wrong(stage: PipelineParallel, plain: nn.Module) -> list[str]:
    count = sum(batch["labels"].numel() for batch in make_batches())
    for batch in make_batches():
        logits = plain(input_ids=batch["input_ids"]).logits.flatten(0, 1)
        labels = batch["labels"].flatten()
        (nn.functional.cross_entropy(logits, labels, reduction="sum") / count).backward()
    expected = {
        name: p.grad
        for name, p in plain.named_parameters(remove_duplicate=False)
        if p.grad is not None
    }
    scale = max(gradient.abs().max() for gradient in expected.values())
    found = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
    assert found, "a stage without gradients"
    return [n for n, g in found.items() if relative_error(g, expected[n], scale=scale) > 1e-11]


def train(names: list[str]) -> None:
    for name in names:
        plain = build(name)
        world = torch.distributed.group.WORLD
        stage = PipelineParallel(copy.deepcopy(plain), FAMILIES[name][3], group=world)
        train_step_pipeline(stage, make_batches())
        assert not wrong(stage, plain), name


def test_families_on_two_stages():
    run_ranks(train, 2, [*FAMILIES])


NORM = "a norm registered after the layers"


def infer_and_refuse() -> None:
    plain, world = build(NORM), torch.distributed.group.WORLD
    stage = PipelineParallel(copy.deepcopy(plain), group=world)  # as its forward calls it
    train_step_pipeline(stage, make_batches())
    assert not wrong(stage, plain)
    norm = DECODER + "layernorm_embedding"
    registered = Split(
        first=(DECODER + "embed_tokens", DECODER + "embed_positions"),
        layers=DECODER + "layers",
        last=(norm, "lm_head"),
    )
    stage = PipelineParallel(plain, registered, group=world)
    text = r"layers\.0 is on stage 0 .* comes back to it after .*layernorm_embedding is on stage 1"
    with pytest.raises((InvalidArgumentError, StageError), match=text):
        train_step_pipeline(stage, make_batches())


def test_a_module_is_where_it_is_called_or_is_named():
    run_ranks(infer_and_refuse, 2)

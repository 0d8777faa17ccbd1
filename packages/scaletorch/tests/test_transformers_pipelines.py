"""Families whose forward does more than a list of layers: stages where their modules are called.

`tools/families` has every family on two stages as in one process.
"""

import copy

import pytest
import torch
from torch import nn

from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.testing import distributed_test, relative_error
from scaletorch.parallel.pipeline_parallel import (
    PipelineParallel,
    Split,
    StageError,
    train_step_pipeline,
)

pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(300)  # each rank imports transformers

WIDTH, VOCAB = 16, 32
BART = {
    "vocab_size": VOCAB, "d_model": WIDTH, "decoder_layers": 2, "decoder_attention_heads": 2,
    "decoder_ffn_dim": 24, "max_position_embeddings": 32, "dropout": 0.0, "pad_token_id": 0,
    "is_decoder": True, "is_encoder_decoder": False, "use_cache": False,
}  # fmt: skip
PATCHES = {
    "hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": 2, "head_dim": 8,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "dropout": 0.0, "vocab_size": VOCAB,
    "max_position_embeddings": 32, "hidden_size_global": WIDTH,
}  # fmt: skip
BLT = {
    **{f"{name}_config": dict(PATCHES) for name in ("patcher", "encoder", "decoder", "global")},
    "encoder_hash_byte_group_vocab": 16, "encoder_hash_byte_group_size": [3],
    "vocab_size": VOCAB, "use_cache": False,
}  # fmt: skip
DECODER = "model.decoder."
EMBEDDINGS = (DECODER + "embed_tokens", DECODER + "embed_positions")
NORM = DECODER + "layernorm_embedding"  # registered after the layers
GLOBAL = "model.global_transformer."
SPLITS = {
    "Bart": (BART, Split((*EMBEDDINGS, NORM), DECODER + "layers", ("lm_head",))),
    "Blt": (  # a list among others, and patches by a frozen module
        BLT,
        Split(
            first=(
                "model.local_encoder",
                "model.encoder_hash_tok_embedding",
                GLOBAL + "token_embedding_projection",
            ),
            layers=GLOBAL + "layers",
            last=("model.local_decoder", "lm_head"),
        ),
    ),
}


def build(name):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SPLITS[name][0])
    return getattr(transformers, f"{name}ForCausalLM")(config).double()


def make_batches():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCAB, (2, 2, 7), generator=generator)
    tokens[0, 1, :2] = 0  # padding
    return [{"input_ids": t[:, :-1], "labels": t[:, 1:]} for t in tokens]


def wrong(stage, plain):
    """Train a step of both; return the names of gradients that are others."""
    train_step_pipeline(stage, make_batches())
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


@distributed_test(world_size=2)
def test_families_on_two_stages():
    world = torch.distributed.group.WORLD
    # Without a split, a model's stages are as its forward calls it.
    for name, split in (*((name, SPLITS[name][1]) for name in SPLITS), ("Bart", None)):
        plain = build(name)
        assert not wrong(PipelineParallel(copy.deepcopy(plain), split, group=world), plain), name


@distributed_test(world_size=2)
def test_a_module_is_where_it_is_called_or_is_named():
    registered = Split(EMBEDDINGS, DECODER + "layers", (NORM, "lm_head"))
    stage = PipelineParallel(build("Bart"), registered, group=torch.distributed.group.WORLD)
    text = r"layers\.0 is on stage 0 .* comes back to it after .*layernorm_embedding is on stage 1"
    with pytest.raises((InvalidArgumentError, StageError), match=text):
        train_step_pipeline(stage, make_batches())

"""Unmodified models of transformers train on every layout as in one process."""

import pytest
from torch import nn

from scaletorch.parallel.pg_manager import Grid
from scaletorch.verify import verify

pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(300)  # each rank imports transformers

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "use_cache": False,  # a cache would be of whole sequences
    "attn_implementation": "sdpa",
}


def sharpened(model: nn.Module) -> nn.Module:
    """Make the weights larger: the usual ones leave attention nearly uniform."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4.0)
    return model


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return sharpened(LlamaForCausalLM(LlamaConfig(**SIZES)))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return sharpened(Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)))


def tied_qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)
    return sharpened(Qwen3ForCausalLM(config))


def tied_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return sharpened(LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)))


def recomputed_qwen3() -> nn.Module:
    model = qwen3()
    # Newer versions have this name, older ones the other.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


@pytest.mark.parametrize("model_fn", [llama, qwen3])
def test_every_layout_trains_like_one_process(model_fn):
    report = verify(model_fn, world_size=4, dtype="float64")
    assert len(report.results) == 10
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("model_fn", "dtype", "grid"),
    [
        (tied_llama, "float64", Grid(tp=2, pp=2)),
        (tied_qwen3, "float64", Grid(tp=2, pp=2)),
        (recomputed_qwen3, "float64", Grid(tp=2, cp=2)),
        (qwen3, "float32", Grid(tp=2, cp=2)),
    ],
)
def test_a_layout_trains_like_one_process(model_fn, dtype, grid):
    report = verify(model_fn, layouts=[grid], dtype=dtype)
    assert report.passed, str(report)

"""Unmodified models of transformers train on every layout as in one process."""

import pytest
import torch
from sweeps import today
from torch import nn

from scaletorch.parallel.pg_manager import Grid
from scaletorch.verify import default_batch, verify
from scaletorch.verify.cases import OPTIONS

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


def mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return sharpened(MistralForCausalLM(MistralConfig(**SIZES)))


def gemma() -> nn.Module:
    from transformers import GemmaConfig, GemmaForCausalLM

    return sharpened(GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=4)))


def three_key_heads() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4}
    return sharpened(Qwen3ForCausalLM(Qwen3Config(**SIZES | heads)))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 8, "n_positions": 64}
    # Attention reads this rate from a dropout module without calling that.
    config = GPT2Config(**sizes, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=1)
    return sharpened(GPT2LMHeadModel(config))


def gpt_neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    return sharpened(GPTNeoXForCausalLM(GPTNeoXConfig(**sizes)))


def recomputed_qwen3() -> nn.Module:
    model = qwen3()
    # Newer versions have this name, older ones the other.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def test_every_layout_trains_like_one_process():
    report = verify(llama, world_size=4, dtype="float64")
    assert len(report.results) == 10
    assert report.passed, str(report)


TWICE = [Grid(tp=2, pp=2), Grid(tp=2, dp=2), Grid(tp=2, cp=2), Grid(pp=2, cp=2)]


@pytest.mark.parametrize(
    ("model_fn", "dtype", "grids"),
    today(
        [
            (tied_llama, "float64", [Grid(tp=2, pp=2)]),
            (tied_qwen3, "float64", [Grid(tp=2, pp=2)]),
            (recomputed_qwen3, "float64", [Grid(tp=2, cp=2)]),
            (qwen3, "float64", [Grid(tp=4), *TWICE]),
            (qwen3, "float32", [Grid(tp=2, cp=2)]),
            (mistral, "float64", [Grid(tp=2, pp=2)]),
            (gemma, "float64", [Grid(tp=4)]),
            (gemma, "float32", [Grid(tp=2, cp=2)]),
            (three_key_heads, "float64", [Grid(tp=4)]),
            (gpt_neox, "float64", [Grid(tp=2, dp=2)]),
            # It takes shapes from ids: a later stage gives it hidden states by their own name.
            (gpt2, "float64", [Grid(tp=3), Grid(tp=2, pp=2), Grid(tp=2, cp=2)]),
        ],
        2,
    ),
)
def test_a_layout_trains_like_one_process(model_fn, dtype, grids):
    report = verify(model_fn, layouts=grids, dtype=dtype)
    assert len(report.results) == len(grids)
    assert report.passed, str(report)


# Of the other models each has those that matter to it, and every schedule is there twice at least.
SCHEDULES = {
    llama: OPTIONS["schedule"],
    tied_llama: ("interleaved_1f1b", "zb_v", "dualpipe_v"),  # with both ends on a rank, and apart
    recomputed_qwen3: ("zb_h1", "looped_bfs", "zb_v"),  # with halves of backwards, and whole ones
    mistral: ("afab", "dualpipe_v"),
    gemma: ("1f1b", "zb_h1"),
    gpt2: ("interleaved_1f1b", "zb_v"),
    gpt_neox: ("looped_bfs", "afab"),
}


@pytest.mark.parametrize("model_fn", today([*SCHEDULES], 2))
def test_every_schedule_trains_like_one_process(model_fn):
    options = {"schedule": SCHEDULES[model_fn]}
    report = verify(model_fn, layouts=[Grid(pp=2)], dtype="float64", options=options)
    assert len(report.results) == len(SCHEDULES[model_fn])
    assert report.passed, str(report)


MIXED = [Grid(tp=2, pp=2), Grid(tp=2, cp=2)]


@pytest.mark.parametrize(
    ("model_fn", "mixed"),
    today(
        [
            *[(model_fn, MIXED) for model_fn in (llama, qwen3, mistral, gemma, gpt_neox)],
            # Between stages of a pipeline its own code would reshape shares by the whole length.
            (gpt2, [Grid(tp=2, cp=2), Grid(tp=3)]),
        ],
        2,
    ),
)
def test_sequence_parallelism(model_fn, mixed):
    report = verify(
        model_fn,
        layouts=mixed,
        dtype="float64",
        options={"sequence_parallel": ["on"]},
    )
    assert report.passed, str(report)


def packed_batch(step):
    """Return three packed documents, told as transformers wants them: lengths and positions."""
    batch = default_batch(step, length=13)
    bounds = torch.tensor((0, 5, 6, 13))
    positions = torch.arange(13) - bounds[:-1].repeat_interleave(bounds.diff())
    labels = batch["labels"].clone()
    labels[:, bounds[1:] - 1] = -100  # the next token is another document's
    told = {"position_ids": positions.expand(labels.shape), "cu_seq_lens_q": bounds}
    return {**batch, "labels": labels, **told}


def sliding_mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return sharpened(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)))


# Each model has half of the pairs of both options, and each method half of the grids.
GRIDS = {
    "ring": [Grid(cp=4), Grid(pp=2, cp=2)],
    "auto": [Grid(tp=2), Grid(tp=2, cp=2)],
}
PAIRS = [
    (llama, "none", "ring"), (llama, "layers", "auto"),
    (sliding_mistral, "none", "auto"), (sliding_mistral, "layers", "ring"),
]  # fmt: skip


@pytest.mark.parametrize(("model_fn", "recompute", "cp_method"), today(PAIRS, 2))
def test_packed_documents_of_any_length_train_like_one_process(model_fn, recompute, cp_method):
    grids = GRIDS[cp_method]
    options = {"recompute": (recompute,), "cp_method": (cp_method,)}
    report = verify(model_fn, packed_batch, layouts=grids, dtype="float64", options=options)
    assert len(report.results) == len(grids)
    assert report.passed, str(report)


def test_gpt2_reshapes_by_whole_sequences_which_stages_do_not_pass_on():
    options = {"sequence_parallel": ["on"]}
    report = verify(gpt2, layouts=[Grid(tp=2, pp=2)], dtype="float64", options=options)
    assert "does not fit this rank's share of the tokens" in str(report)

"""Unmodified models of transformers train on every layout as in one process."""

from math import prod

import pytest
import torch
from sweeps import today
from tiny_transformers import tiny
from training import grid, tokens

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist.errors import ScaletorchError
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.pg_manager import Grid
from scaletorch.verify import default_batch, every_layout, verify
from scaletorch.verify.cases import OPTIONS
from scaletorch.verify.problem import sharpened

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(300)  # each rank imports transformers

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64,
    "use_cache": False, "attn_implementation": "sdpa",
}  # fmt: skip


def build(family, kind="ForCausalLM", **sizes):
    config = getattr(transformers, f"{family}Config")(**sizes)
    return sharpened(getattr(transformers, f"{family}{kind}")(config))


def llama():
    return build("Llama", **SIZES)


def qwen3(**options):
    return build("Qwen3", **{**SIZES, "head_dim": 8, **options})


def tied_qwen3():
    return qwen3(tie_word_embeddings=True)


def three_key_heads():
    return qwen3(num_attention_heads=6, num_key_value_heads=3, head_dim=4)


def gpt2():
    # Attention reads this rate from a dropout module without calling that.
    rate = {"attn_pdrop": 0.0, "use_cache": False, "bos_token_id": 0, "eos_token_id": 1}
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 8, "n_positions": 64}
    return build("GPT2", "LMHeadModel", **sizes, **rate)


def recomputed_qwen3():
    model = qwen3()
    # Newer versions have this name, older ones the other.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def sliding_mistral():
    return build("Mistral", **SIZES, sliding_window=4)


def packed_batch(step):
    """Return three packed documents, told as transformers wants them: lengths and positions."""
    batch = default_batch(step, length=13)
    bounds = torch.tensor((0, 5, 6, 13))
    positions = torch.arange(13) - bounds[:-1].repeat_interleave(bounds.diff())
    labels = batch["labels"].clone()
    labels[:, bounds[1:] - 1] = -100  # the next token is another document's
    told = {"position_ids": positions.expand(labels.shape), "cu_seq_lens_q": bounds}
    return {**batch, "labels": labels, **told}


def test_every_layout_trains_like_one_process():
    layouts = today(every_layout(4), 5)
    report = verify(llama, layouts=layouts, dtype="float64")
    assert len(report.results) == len(layouts)
    assert report.passed, str(report)


MIXED = [Grid(tp=2, cp=2), Grid(tp=2, pp=2)]
SHARED = {"sequence_parallel": ["on"]}
# `tools/families` has other families; here is what these have beside them.
CASES = [
    (tied_qwen3, [Grid(tp=2, pp=2)], {}),
    (recomputed_qwen3, [Grid(tp=2, cp=2)], {}),
    (qwen3, [Grid(tp=4), Grid(tp=2, dp=2)], {}),
    (three_key_heads, [Grid(tp=4)], {}),
    # It takes shapes from ids: a later stage gives it hidden states by their own name.
    (gpt2, [Grid(tp=3), Grid(tp=2, pp=2), Grid(tp=2, cp=2)], {}),
    (llama, [Grid(pp=2)], {"schedule": OPTIONS["schedule"]}),
    # With both ends on a rank, and apart; with halves of backwards, and whole ones.
    (tied_qwen3, [Grid(pp=2)], {"schedule": ("interleaved_1f1b", "zb_v", "dualpipe_v")}),
    (recomputed_qwen3, [Grid(pp=2)], {"schedule": ("zb_h1", "looped_bfs", "zb_v")}),
    (llama, MIXED, SHARED),
    (qwen3, MIXED, SHARED),
    # Between stages of a pipeline its own code would reshape shares by the whole length.
    (gpt2, [Grid(tp=2, cp=2), Grid(tp=3)], SHARED),
]


def check(model_fn, *batch_fn, grids, options, dtype="float64"):
    report = verify(model_fn, *batch_fn, layouts=grids, dtype=dtype, options=options)
    assert len(report.results) == len(grids) * prod(map(len, options.values()))
    assert report.passed, str(report)


@pytest.mark.parametrize(("model_fn", "grids", "options"), today(CASES, 6))
def test_a_layout_trains_like_one_process(model_fn, grids, options):
    check(model_fn, grids=grids, options=options)


def test_a_layout_trains_like_one_process_in_float32():
    check(qwen3, grids=[Grid(tp=2, cp=2), Grid(pp=2, cp=2)], options={}, dtype="float32")


# Each model has half of the pairs of both options, and each method half of the grids.
GRIDS = {
    "ring": [Grid(cp=4), Grid(pp=2, cp=2)],
    "auto": [Grid(tp=2), Grid(tp=2, cp=2)],
}
PAIRS = [
    (llama, "none", "ring"), (llama, "layers", "auto"),
    (sliding_mistral, "none", "auto"), (sliding_mistral, "layers", "ring"),
]  # fmt: skip


@pytest.mark.parametrize(("model_fn", "recompute", "cp_method"), today(PAIRS, 4))
def test_packed_documents_of_any_length_train_like_one_process(model_fn, recompute, cp_method):
    options = {"recompute": (recompute,), "cp_method": (cp_method,)}
    check(model_fn, packed_batch, grids=GRIDS[cp_method], options=options)


def test_gpt2_reshapes_by_whole_sequences_which_stages_do_not_pass_on():
    options = {"sequence_parallel": ["on"]}
    report = verify(gpt2, layouts=[Grid(tp=2, pp=2)], dtype="float64", options=options)
    assert "does not fit this rank's share of the tokens" in str(report)


@distributed_test(world_size=2)
def test_roberta_is_told_where_its_positions_begin():
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    with grid(cp_size=2) as manager:
        roberta = tiny("Roberta", "ForMaskedLM", **drops, pad_token_id=1)
        model = parallelize(roberta, manager, rehearse=False)
        with pytest.raises(ScaletorchError, match="counts its positions from its padding index on"):
            train_step(model, shard_global_batch(tokens(0), 1, manager), manager)

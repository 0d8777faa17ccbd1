"""Families of transformers that cannot be divided along the sequence, context parallel."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from operator import itemgetter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as c10d
import torch.nn.functional as F
from refused_calls import require_words, words_of

from scaletorch.compose import full_gradients, parallelize, shard_global_batch, train_step
from scaletorch.dist.testing import preload, relative_error, run_ranks, worst
from scaletorch.parallel.context_parallel import ShardedSequences, apply_context_parallel
from scaletorch.parallel.context_parallel.models import undivided
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(300)
SIZES = {
    "vocab_size": 32, "use_cache": False, "initializer_range": 0.3, "init_std": 0.3,
    **dict.fromkeys(("hidden_size", "d_model", "emb_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "d_inner", "dim_ff", "ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("dropout", "attention_dropout", "dropout_p", "activation_dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
}  # fmt: skip
# What each makes of whole sequences.
FAMILIES = {
    "XLNetLMHeadModel": {},  # distances, of hidden states [L, B, H]
    "XLMWithLMHeadModel": {"max_position_embeddings": 64},  # a mask by which it multiplies
    "CpmAntForCausalLM": {"dim_head": 8, "prompt_length": 3},  # a prompt before tokens, masks
    "ProphetNetForCausalLM": {"ngram": 2, "max_position_embeddings": 64},  # streams, whose head is
    "BigBirdForMaskedLM": {  # blocks that see others drawn at random
        "block_size": 2, "num_random_blocks": 1, "max_position_embeddings": 64,
    },
    "ReformerModelWithLMHead": {  # chunks and hashes; layers that compute their own gradients
        "attn_layers": ["local", "lsh"], "axial_pos_shape": [4, 5], "axial_pos_embds_dim": [16, 16],
        "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 4, "hash_seed": 1,
        "attention_head_size": 8, "feed_forward_size": 48, "is_decoder": True,
        "lsh_attention_probs_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0,
    },
    "BartForCausalLM": {"decoder_layers": 1, "decoder_attention_heads": 4, "encoder_layers": 1},
    "FalconForCausalLM": {"alibi": True, "new_decoder_architecture": False},  # ALiBi in its masks
}  # fmt: skip
LENGTH, ODD = 20, 17
ANY_LENGTH = [name for name in FAMILIES if name not in ("ReformerModelWithLMHead",)]


class Counting(torch.nn.Embedding):
    """Counts positions, and cannot be told them."""

    def forward(self, ids, *start, **_):
        return self.weight[: ids.shape[1]]


def _build(name):
    torch.manual_seed(3)
    model_class = getattr(transformers, name)
    takes = {field.name for field in dataclasses.fields(model_class.config_class)}
    sizes = {field: value for field, value in SIZES.items() if field in takes}
    model = model_class(model_class.config_class(**sizes | FAMILIES[name])).double()
    if name == "BartForCausalLM":
        model.model.decoder.embed_positions.__class__ = Counting
    with torch.no_grad():  # biases and scales are to matter too
        generator = torch.Generator().manual_seed(5)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise, alpha=0.1)
    return model


def _batch(rows, length):
    ids = torch.randint(3, 32, (rows, length), generator=torch.Generator().manual_seed(4))
    return {"input_ids": ids, "labels": ids}


def _gradients(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


def _told(rows, ranks):
    """Return a context in which a warning says that ranks have no rows, if they have none."""
    if rows >= ranks:
        return contextlib.nullcontext()
    idle = f"of {ranks} context-parallel ranks {ranks - rows} have none of the {rows}"
    return pytest.warns(RuntimeWarning, match=idle)


def _differences(names, rows, layout, length):
    """Return how far each family's loss and gradients are from those of one process."""
    found = {}
    for name in names:
        plain, world = _build(name), c10d.group.WORLD
        model = apply_context_parallel(copy.deepcopy(plain), world, layout=layout)
        whole = _batch(rows, length)
        logits = plain(whole["input_ids"]).logits[:, :-1]
        expected = F.cross_entropy(logits.mT, whole["labels"][:, 1:], reduction="sum")
        expected.backward()
        sequences = ShardedSequences(length, layout=layout, group=world)
        mine = sequences.shard(whole)
        with sequences.inside(model):
            with _told(rows, c10d.get_world_size()):
                logits = model(mine["input_ids"]).logits
            loss = F.cross_entropy(logits.mT, mine["labels"], reduction="sum")
            loss.backward()
        values = [loss.detach(), *_gradients(model)]
        for value in values:
            c10d.all_reduce(value)
        right = _gradients(plain)
        every = torch.cat([x.flatten() for x in right])  # a key's bias has only rounding
        pairs = zip(values, [expected.detach(), *right], strict=True)
        found[name] = worst(relative_error(a, b, scale=every) for a, b in pairs)
    return found


@pytest.mark.parametrize(
    ("ranks", "rows", "layout", "length", "names"),
    [
        (2, 3, "zigzag", LENGTH, [*FAMILIES]),
        (2, 1, "contiguous", ODD, ANY_LENGTH),
        (4, 2, "zigzag", ODD, ANY_LENGTH[:2]),
        (1, 2, "zigzag", ODD, ANY_LENGTH),
    ],
)
def test_whole_sequences_of_some_rows(ranks, rows, layout, length, names):
    preload("transformers")
    found = run_ranks(_differences, ranks, names, rows, layout, length, timeout=240)[0]
    assert worst(found.values()) <= 1e-6, found  # some compute scores in float32


def _padded():
    """Return how far logits are from one process's where rows end earlier than others."""
    plain, world = _build("XLNetLMHeadModel").eval(), c10d.group.WORLD
    ids = _batch(4, LENGTH)["input_ids"]
    mask = (torch.arange(LENGTH) < torch.tensor([[20], [7], [12], [3]])).long()
    expected = plain(ids, attention_mask=mask, use_mems=False).logits
    model = apply_context_parallel(copy.deepcopy(plain), world, layout="zigzag")
    sequences = ShardedSequences(LENGTH, layout="zigzag", group=world)
    mine = sequences.shard({"input_ids": ids, "attention_mask": mask})
    logits = model(mine["input_ids"], attention_mask=mine["attention_mask"], use_mems=False).logits
    return relative_error(sequences.unshard(logits), expected)


def test_padding_is_told_by_a_mask():
    preload("transformers")
    assert worst(run_ranks(_padded, 2)) <= 1e-12


def _steps(name, sizes, options):
    """Return how far a step of the whole grid is from one of one process."""
    plain, whole = _build(name), _batch(4, LENGTH)
    logits = plain(whole["input_ids"]).logits
    F.cross_entropy(logits.flatten(0, 1), whole["labels"].flatten()).backward()
    right = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    every = torch.cat([x.flatten() for x in right.values()])
    manager = setup_process_group_manager(**sizes)
    try:
        model = parallelize(_build(name), manager, **options, rehearse=False)
        micro_batches = 2 if manager.pp_size > 1 else 1
        train_step(model, shard_global_batch(whole, micro_batches, model=model))
        found = full_gradients(model)
    finally:
        destroy_process_group_manager()
    return worst(relative_error(found[n], x, scale=every) for n, x in right.items())


CASES = [
    ("FalconForCausalLM", {"cp_size": 2}, {"recompute": True}),
    ("XLNetLMHeadModel", {"cp_size": 2}, {"recompute": True}),
    ("BigBirdForMaskedLM", {"cp_size": 2}, {}),
]


def _all_steps(cases):
    return {str(case): _steps(*case) for case in cases}


def test_steps_on_a_grid():
    preload("transformers")
    found = run_ranks(_all_steps, 2, CASES, timeout=240)[0]
    assert worst(found.values()) <= 1e-9, found


def test_steps_of_a_pipeline():
    preload("transformers")
    cases = [(name, {"cp_size": 2, "pp_size": 2}, {}) for name in ("XLNetLMHeadModel",)]
    found = run_ranks(_all_steps, 4, cases, timeout=240)[0]
    assert worst(found.values()) <= 1e-9, found


def _parallel(name):
    return apply_context_parallel(_build(name), c10d.group.WORLD, layout="contiguous")


def _of_rows(ids):
    _parallel("XLMWithLMHeadModel")(ids, lengths=torch.tensor([10, 10]))


def _of_pairs(ids):
    _parallel("XLNetLMHeadModel")(ids, perm_mask=torch.zeros(2, 10, 10))


def _memory(ids):
    states = torch.ones(2, 5, 32, dtype=torch.float64)
    _parallel("ProphetNetForCausalLM")(ids, encoder_hidden_states=states)


def _documents(ids):
    model = _parallel("XLNetLMHeadModel")
    sequences = ShardedSequences(
        LENGTH, layout="contiguous", cu_seqlens=(0, 5, LENGTH), group=c10d.group.WORLD
    )
    with sequences.inside(model):
        model(ids)


def _labels(ids):
    _parallel("XLNetLMHeadModel")(ids, labels=ids)


def _rows_differ(ids):
    _parallel("XLNetLMHeadModel")(ids[: 1 + c10d.get_rank()])


class Summed(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x.cumsum(1))


def _head_mixes(ids):
    model = _build("XLNetLMHeadModel")
    model.lm_loss = Summed(32, 32).double()
    apply_context_parallel(model, c10d.group.WORLD, layout="contiguous")(ids)


def _head_pools(ids):
    config = transformers.XLNetConfig(**SIZES)
    apply_context_parallel(transformers.XLNetForSequenceClassification(config), c10d.group.WORLD)


def _attends_beside(ids):
    with patch.object(undivided, "_body", lambda model: model.model):  # which it does not call
        model = _parallel("BartForCausalLM")
    model(ids)


REFUSED = {
    _attends_beside: "attends outside of the module that was to run on whole sequences",
    _of_rows: r"each rank runs it on whole sequences of some rows; lengths, a tensor \[2\], is not",
    _of_pairs: r"perm_mask, a tensor \[2, 10, 10\], is not of this rank's shard \[2, 10\]",
    _memory: r"encoder_hidden_states, a tensor \[2, 5, 32\], is not",
    _documents: "XLNetModel keeps no packed documents apart",
    _labels: "was given labels",
    _rows_differ: "the ranks differ",
    _head_mixes: r"module lm_loss \(Summed\) computes a position from others",
    _head_pools: "XLNetForSequenceClassification pools over the sequence",
}


def _refuse():
    return words_of(REFUSED, _batch(2, LENGTH), itemgetter("input_ids"))


def test_what_is_not_of_each_position_is_refused():
    preload("transformers")
    require_words(REFUSED, run_ranks(_refuse, 2, timeout=240))

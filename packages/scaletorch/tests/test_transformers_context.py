"""Models of transformers, context parallel through their own attention registry."""

from __future__ import annotations

import copy
import re
import warnings
from itertools import pairwise

import pytest
import torch
import torch.distributed as c10d
import torch.nn.functional as F
from tiny_transformers import tiny

from scaletorch.dist.errors import InvalidArgumentError, MismatchError, StateError
from scaletorch.dist.testing import distributed_test, relative_error, run_ranks, worst
from scaletorch.parallel.context_parallel import (
    ShardedSequences,
    apply_context_parallel,
    shard_batch,
)

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(300)  # each rank imports transformers

LENGTH = 24
PACKED = (0, 5, 12, 12, 24)  # 12 is where shards of two ranks meet
SPECIAL = {
    "Qwen3": {"head_dim": 4},
    "DeepseekV3": {
        "num_key_value_heads": 8, "first_k_dense_replace": 2, "q_lora_rank": 8, "kv_lora_rank": 8,
        "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    },
    "Mistral": {"sliding_window": 7},
    "Gemma2": {"head_dim": 4, "sliding_window": 7, "attn_logit_softcapping": 0.7},
    "Falcon": {"new_decoder_architecture": False, "multi_query": False},
    "GptOss": {
        "head_dim": 4, "sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 1,
    },
    "Llama4Text": {
        "head_dim": 4, "moe_layers": [], "intermediate_size_mlp": 24, "attention_chunk_size": 5,
        "no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"],
    },
    "Qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "ModernBert": {"local_attention": 6, "pad_token_id": 0},
    "Mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "Qwen3Next": {
        "layer_types": ["linear_attention", "full_attention"], "head_dim": 8,
        **{f"linear_{each}_head_dim": 8 for each in ("key", "value")},
        **{f"linear_num_{each}_heads": 4 for each in ("key", "value")},
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
}  # fmt: skip
EXACT = ("Gemma2", "Mamba2", "Qwen3Next")  # they compute some of it in float32


def _build(name, **options):
    heads = {} if name == "GPT2" else {"num_attention_heads": 8, "num_key_value_heads": 4}
    kind = "ForMaskedLM" if name.endswith("Bert") else "ForCausalLM"
    options = {**heads, **SPECIAL.get(name, {}), **options}
    return tiny(name, kind, exact=name in EXACT, **options)


def _tokens(rows=2, length=LENGTH):
    return torch.randint(1, 32, (rows, length), generator=torch.Generator().manual_seed(2))


def _token_losses(model, batch, **told):
    """Return the sum of the losses of targets that are shifted already."""
    # Without a cache transformers guesses documents from positions; shards must not mislead it.
    if type(model).__name__ != "Mamba2ForCausalLM":  # which takes no positions
        told["position_ids"] = batch["position_ids"]
    out = model(batch["input_ids"], use_cache=False, **told)
    return F.cross_entropy(out.logits.mT, batch["labels"], reduction="sum")


def _expected(name, documents, **options):
    """Return loss and gradients of one process that runs each document by itself."""
    model, ids, total = _build(name, **options), _tokens(), 0.0
    for start, stop in pairwise(documents):
        if stop - start > 1:
            part = ids[:, start:stop]
            total = total + F.cross_entropy(
                model(part).logits[:, :-1].mT, part[:, 1:], reduction="sum"
            )
    total.backward()
    return [total.detach(), *(p.grad for p in model.parameters())]


def _worst(loss, model, expected, **scale):
    """Return the largest relative difference of loss and gradients, summed over the ranks."""
    found = [loss.detach(), *(p.grad for p in model.parameters())]
    for mine in found:
        c10d.all_reduce(mine)
    pairs = zip(found, expected, strict=True)
    return worst(relative_error(mine, theirs, **scale) for mine, theirs in pairs)


def _step(name, layout, method, documents=None, how="told", recompute=None):
    world = c10d.group.WORLD
    expected = _expected(name, documents or (0, LENGTH))
    model = apply_context_parallel(_build(name), world, layout=layout, method=method)
    if recompute is not None:
        model.train()
        kind = {"use_reentrant": recompute == "reentrant"}
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)(kind)
        model.enable_input_require_grads()
    sequences = ShardedSequences(LENGTH, layout=layout, cu_seqlens=documents, group=world)
    batch = sequences.shard({"input_ids": _tokens(), "labels": _tokens()})
    if how == "inside":
        with sequences.inside(model):
            loss = _token_losses(model, batch)
            loss.backward()
    else:
        told = {} if documents is None else {"cu_seq_lens_q": torch.tensor(documents)}
        loss = _token_losses(model, batch, **told)
        loss.backward()
    return _worst(loss, model, expected)


CASES = [
    ("Llama", "zigzag", "ring"),
    ("Llama", "contiguous", "ulysses"),
    ("Llama", "zigzag", "ring", PACKED),
    ("Llama", "contiguous", "ulysses", PACKED),
    ("Llama", "zigzag", "ring", PACKED, "told", "plain"),
    ("Llama", "zigzag", "ulysses", PACKED, "inside", "reentrant"),
    ("Llama", "stripe", "all_gather", PACKED, "inside"),
    ("Mistral", "zigzag", "ring"),
    ("Mistral", "contiguous", "ulysses"),
    ("Mistral", "zigzag", "ring", PACKED, "inside", "plain"),
    ("Qwen3", "zigzag", "auto", PACKED),
    ("DeepseekV3", "zigzag", "ulysses", PACKED),  # its values have another head dim than its keys
    ("Qwen2", "zigzag", "ring", PACKED),
    ("GPT2", "zigzag", "ring", PACKED),
    ("GPT2", "contiguous", "ulysses", PACKED, "inside", "plain"),
    ("Gemma2", "zigzag", "ring"),
    ("Gemma2", "contiguous", "ulysses", PACKED),
    ("GptOss", "zigzag", "ring", PACKED, "inside", "plain"),
    ("GptOss", "contiguous", "ulysses"),
    ("GptOss", "stripe", "all_gather", PACKED),
    ("Llama4Text", "zigzag", "ring"),
    ("Llama4Text", "contiguous", "ulysses", PACKED, "inside"),
    ("Mamba2", "zigzag", "auto"),  # its layers pass a state along the sequence
    ("Mamba2", "contiguous", "auto"),
    ("Qwen3Next", "zigzag", "auto"),
    ("Qwen3Next", "contiguous", "auto"),
]


def _steps(cases):
    return [_step(*case) for case in cases]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradients_equal_one_process(size):
    # On one rank the model is its own, but inside of sequences; two ranks try every case.
    cases = [case for case in CASES if size > 1 or "inside" in case]
    cases = cases[::2] if size == 4 else cases
    for errors in run_ranks(_steps, size, cases):
        for case, error in zip(cases, errors, strict=True):
            assert error < 1e-12, case


def _encode(name, layout, method):
    """Return the largest difference to one process of an encoder; its last positions are padded."""
    ids, world = _tokens(length=13), c10d.group.WORLD
    reference = _build(name).eval()
    expected = F.cross_entropy(reference(ids).logits.mT, ids, reduction="sum")
    expected.backward()
    model = apply_context_parallel(_build(name), world, method=method).eval()
    sequences = ShardedSequences(13, layout=layout, group=world)
    batch = {"input_ids": ids, "targets": ids, "attention_mask": torch.ones_like(ids)}
    batch = sequences.shard(batch)
    targets = batch.pop("targets")
    with sequences.inside(model), warnings.catch_warnings():
        # With padding it cannot be asked what it mixes, and says so.
        warnings.filterwarnings("ignore", ".*could not be asked", RuntimeWarning)
        # Only padding has token 0.
        loss = F.cross_entropy(model(**batch).logits.mT, targets, reduction="sum", ignore_index=0)
        loss.backward()
    for parameter in (*reference.parameters(), *model.parameters()):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    grads = [p.grad for p in reference.parameters()]
    every = torch.cat([x.flatten() for x in grads])  # a key's bias has none but rounding
    return _worst(loss, model, [expected.detach(), *grads], scale=every)


ENCODERS = [
    (name, *how)
    for name in ("Bert", "ModernBert")
    for how in (("zigzag", "ring"), ("contiguous", "ulysses"))
]


def _encoders():
    return [_encode(*case) for case in ENCODERS]


@pytest.mark.parametrize("size", [1, 2])
def test_full_attention_and_windows_to_both_sides_with_padding(size):
    for errors in run_ranks(_encoders, size):
        for case, error in zip(ENCODERS, errors, strict=True):
            assert error < 1e-10, case


@distributed_test(world_size=2)
def test_a_padded_zigzag_shard_needs_no_more_than_its_name():
    """Causal attention sees no padding."""
    ids, world = _tokens(length=13), c10d.group.WORLD
    expected = _build("Llama")(ids).logits
    model = apply_context_parallel(_build("Llama"), world, layout="zigzag")
    sequences = ShardedSequences(13, group=world)
    found = sequences.unshard(model(**sequences.shard({"input_ids": ids}), use_cache=False).logits)
    assert relative_error(found, expected) < 1e-12


@distributed_test(world_size=2)
def test_other_models_and_copies_are_not_touched():
    """Check what else changes, and what does not."""
    world = c10d.group.WORLD
    plain = _build("Llama")
    shared = type(plain)(plain.config).double()
    batch = shard_batch({"input_ids": _tokens()}, world, layout="zigzag")
    args = {name: batch[name] for name in ("input_ids", "position_ids")}
    before = shared(**args).logits
    model = apply_context_parallel(plain, world, layout="zigzag")
    assert model.config._attn_implementation.endswith(
        "context_parallel.models.transformers_attention"
    )
    assert model.config is model.model.layers[0].self_attn.config
    assert shared.config._attn_implementation == "sdpa"
    assert torch.equal(shared(**args).logits, before)

    twin = copy.deepcopy(model)
    assert torch.equal(twin(**args).logits, model(**args).logits)
    sequences = ShardedSequences(LENGTH, cu_seqlens=PACKED, group=world)
    told = {"cu_seq_lens_q": torch.tensor(PACKED)}
    with sequences.inside(twin):
        assert torch.equal(twin(**args).logits, model(**args, **told).logits)
        assert not torch.equal(twin(**args).logits, model(**args).logits)

    borrower = type(plain)(model.config).double()
    with pytest.raises(StateError, match="not context parallel asks for the attention of one"):
        borrower(**args)
    with pytest.raises(StateError, match="not context parallel asks for the attention of one"):
        borrower.model.layers[0].self_attn(
            torch.ones(1, 4, 32).double(), (torch.ones(1, 4, 4), torch.ones(1, 4, 4))
        )


def test_one_process_is_left_as_it_is_outside_of_sequences():
    model = _build("Mistral")
    expected = model(_tokens()).logits
    assert torch.equal(apply_context_parallel(model)(_tokens()).logits, expected)
    assert model.config._attn_implementation == "sdpa"
    sequences = ShardedSequences(LENGTH, cu_seqlens=PACKED)
    with sequences.inside(model):
        assert not torch.equal(model(_tokens()).logits, expected)
    with pytest.raises(InvalidArgumentError), sequences.inside(model):
        model(_tokens(length=5))
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(_tokens()).logits, expected)


def _decode(model, batch):
    cache = model(**batch, use_cache=True).cache
    model(**batch, cache=cache)


def _packed(model, batch):
    """Positions that restart where both ranks' shards begin."""
    model(**{**batch, "position_ids": torch.arange(12)[None]})


def _other_layout(model, batch):
    model(**shard_batch({"input_ids": _tokens()}, c10d.group.WORLD, layout="stripe"))


def _inside(model, batch):
    sequences = ShardedSequences(LENGTH, cu_seqlens=PACKED, group=c10d.group.WORLD)
    with sequences.inside(model):
        model(**batch, cu_seq_lens_q=torch.tensor([0, 6, 24]))


def _calls(**given):
    return lambda model, batch: model(**batch, **given)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
ONES = torch.ones(2, 12, dtype=torch.long)
TOLD = torch.tensor(PACKED)
REFUSED = {  # a call and what is said of it; the family and its options, if it is no Llama
    "padding": (_calls(attention_mask=ONES.tril()), "attention_mask must hold no zeros"),
    "whole mask": (_calls(attention_mask=ONES.repeat(1, 2)), r"must be .* shard, .B, 12.,"),
    "4-d mask": (_calls(attention_mask=torch.zeros(2, 1, 12, 12)), "attention_mask must be None"),
    "cache": (_decode, "12 queries from position 12 on and 24 keys: neither decoding"),
    "attentions": (_calls(output_attentions=True), "for output_attentions, which cannot"),
    "unknown": (_calls(position_bias=ONES), "for position_bias, which cannot be computed"),
    "keys": (
        _calls(cu_seq_lens_q=TOLD, cu_seq_lens_k=torch.tensor([0, 24])),
        "cu_seq_lens_k must equal cu_seq_lens_q",
    ),
    "end": (_calls(cu_seq_lens_q=torch.tensor([0, 12])), "end with .* 24; it ends with 12"),
    "2-d": (_calls(cu_seq_lens_q=TOLD[None]), "cu_seqlens must be integers .*'list'"),
    "twice": (_inside, r"cu_seq_lens_q are \(0, 6, 24\), and the sequences .* \(0, 5, 12"),
    "restart": (_packed, "pass the documents as cu_seq_lens_q"),
    "layout": (_other_layout, "not those of this rank's zigzag shard"),
    "dropout": (
        _calls(), "attention dropout must be 0, and is 0.5", "Llama", {"attention_dropout": 0.5},
    ),
    "labels": (_calls(labels=torch.zeros(2, 12, dtype=torch.long)), "was given labels, which it"),
    "uncounted": (lambda model, batch: model(batch["input_ids"]), "called without position_ids"),
    "one rank": (
        lambda model, batch: model(**batch, attention_mask=ONES - c10d.get_rank()),
        "attention_mask must hold no zeros|rank 1 cannot take part in",
    ),
    "counted": (
        _calls(), "scales its queries by positions that it counts itself.* from 24 on .floor_sc",
        "Llama4Text", {"floor_scale": 24},
    ),
    "a state": (_calls(cu_seq_lens_q=TOLD), "one packed document to the next", "Qwen3Next", {}),
}  # fmt: skip


def _refuse():
    world, messages = c10d.group.WORLD, {}
    for key, (call, _, *special) in REFUSED.items():
        name, options = special or ("Llama", {})
        batch = shard_batch({"input_ids": _tokens()}, world, layout="zigzag")
        model = apply_context_parallel(_build(name, **options), world, layout="zigzag")
        try:
            call(model, batch)
        except (InvalidArgumentError, MismatchError, StateError) as error:
            messages[key] = str(error)
    return messages


def test_what_cannot_be_exact_is_refused_by_name():
    for rank, messages in enumerate(run_ranks(_refuse, 2)):
        for key, (_, match, *_) in REFUSED.items():
            assert re.search(match, messages.get(key, "nothing")), (key, messages.get(key))
            assert re.search(f"rank {rank}|rank 1 cannot", messages[key]), key


def test_models_with_other_layers_are_refused():
    model = apply_context_parallel(_build("Llama", rope_parameters=DYNAMIC))
    before, inside = model.config._attn_implementation, ShardedSequences(8).inside(model)
    with pytest.raises(InvalidArgumentError, match="rotary embeddings of type dynamic"), inside:
        pass
    assert model.config._attn_implementation == before

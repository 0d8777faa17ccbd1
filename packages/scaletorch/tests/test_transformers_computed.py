"""Families of transformers that compute their attention themselves, context parallel."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
import torch.distributed as c10d
import torch.nn.functional as F
from refused_calls import require_words, words_of

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import preload, relative_error, run_ranks, worst
from scaletorch.parallel.context_parallel import ShardedSequences, apply_context_parallel

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(300)
LENGTH, PACKED = 16, (0, 5, 8, 16)
SIZES = {
    "vocab_size": 32, "hidden_size": 32, "n_embd": 32, "d_model": 32, "num_hidden_layers": 2,
    "n_layer": 2, "n_layers": 2, "num_layers": 2, "num_attention_heads": 4, "n_head": 4,
    "n_heads": 4, "num_heads": 4, "intermediate_size": 48, "max_position_embeddings": 32,
    "initializer_range": 0.3, "is_decoder": True, "use_cache": False,
    **dict.fromkeys(("dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
}  # fmt: skip
# What each is to show beside a mask of whole sequences.
FAMILIES = {
    "Bloom": {},  # biases of whole sequences, no positions
    "Mpt": {"max_seq_len": 32},  # biases of any length
    "OpenAIGPT": {"n_positions": 32},  # a triangle of its own
    "GPTNeo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "GPTNeoXJapanese": {},  # angles [B, L, D]; returns a bias beside its output
    "RoFormer": {"embedding_size": 32},  # angles [1, 1, L, D], positions counted in an encoder
    "RemBert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "Falcon": {"new_decoder_architecture": False, "multi_query": False},
    "DeepseekV32": {  # which keys are seen depends on all of them
        "num_key_value_heads": 4, "first_k_dense_replace": 2, "q_lora_rank": 8, "kv_lora_rank": 8,
        "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "index_n_heads": 2,
        "index_head_dim": 8, "index_topk": 4,
    },
    "Mvp": {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
    "Musicgen": {"num_codebooks": 1, "ffn_dim": 48},  # a table that numbers its rows itself
}  # fmt: skip
SUFFIX = {"OpenAIGPT": "LMHeadModel"}
CONFIG = {"Musicgen": "MusicgenDecoder"}
COUNTS_NOTHING = ("Bloom", "Mpt")


def _build(name, **options):
    torch.manual_seed(3)
    config_class = getattr(transformers, f"{CONFIG.get(name, name)}Config")
    config = config_class(**SIZES | FAMILIES[name] | options)
    model = getattr(transformers, f"{name}{SUFFIX.get(name, 'ForCausalLM')}")(config).double()
    with torch.no_grad():  # biases and scales are to matter too
        generator = torch.Generator().manual_seed(5)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise, alpha=0.1)
    return model


def _batch(rows, length=LENGTH):
    ids = torch.randint(3, 32, (rows, length), generator=torch.Generator().manual_seed(4))
    return {"input_ids": ids, "labels": ids}


def _logits(name, model, batch, **given):
    positions = {} if name in COUNTS_NOTHING else {"position_ids": batch["position_ids"]}
    return model(batch["input_ids"], **positions, **given).logits


def _train(name, model, batch):
    """Run forward and backward; return loss and gradients."""
    loss = F.cross_entropy(_logits(name, model, batch).mT, batch["labels"], reduction="sum")
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def _alone(name, model, rows, length, documents):
    """Return loss and gradients of one process, which runs each document by itself."""
    ids, total = _batch(rows, length)["input_ids"], 0.0
    for start, stop in pairwise(documents):
        part = ids[:, start:stop]
        total = total + F.cross_entropy(model(part).logits[:, :-1].mT, part[:, 1:], reduction="sum")
    total.backward()
    return [total.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def _differences(names, rows, layout, length, documents):
    """Return how far each family's loss and gradients are from those of one process."""
    found = {}
    for name in names:
        plain = _build(name)
        model = apply_context_parallel(copy.deepcopy(plain), c10d.group.WORLD, layout=layout)
        expected = _alone(name, plain, rows, length, documents or (0, length))
        sequences = ShardedSequences(
            length, layout=layout, cu_seqlens=documents, group=c10d.group.WORLD
        )
        with sequences.inside(model):
            mine = _train(name, model, sequences.shard(_batch(rows, length)))
        for value in mine:
            c10d.all_reduce(value)
        every = torch.cat([x.flatten() for x in expected[1:]])  # a key's bias has only rounding
        pairs = zip(mine, expected, strict=True)
        found[name] = worst(relative_error(a, b, scale=every) for a, b in pairs)
    return found


@pytest.mark.parametrize(
    ("ranks", "rows", "layout", "length"),
    [(2, 3, "zigzag", 16), (2, 1, "contiguous", 13), (4, 2, "zigzag", 16)],
)
def test_attention_that_models_compute_themselves(ranks, rows, layout, length):
    preload("transformers")
    names = list(FAMILIES) if ranks == 2 else ["Bloom", "RoFormer"]
    found = run_ranks(_differences, ranks, names, rows, layout, length, None, timeout=240)[0]
    assert worst(found.values()) <= 1e-6, found  # many of them compute scores in float32


@pytest.mark.parametrize("ranks", [1, 2])
def test_packed_documents_are_kept_apart_by_masks(ranks):
    preload("transformers")
    names = ["GPTNeoXJapanese", "RemBert", "Bloom"]
    found = run_ranks(_differences, ranks, names, 2, "zigzag", LENGTH, PACKED, timeout=240)
    assert worst(found[0].values()) <= 1e-6, found


def _weights(batch):
    _logits("RemBert", _parallel("RemBert"), batch, output_attentions=True)


def _mask(batch):
    ones = torch.ones_like(batch["input_ids"])
    _logits("OpenAIGPT", _parallel("OpenAIGPT"), batch, attention_mask=ones)


def _triangle(batch):
    model = _parallel("OpenAIGPT")
    world = c10d.group.WORLD
    sequences = ShardedSequences(LENGTH, layout="contiguous", cu_seqlens=PACKED, group=world)
    with sequences.inside(model):
        _logits("OpenAIGPT", model, batch)


def _uncounted(batch):
    _parallel("OpenAIGPT")(batch["input_ids"])


def _counted_alike(batch):
    _parallel("RoFormer")(batch["input_ids"])


def _longer(batch):
    _logits("Musicgen", _parallel("Musicgen"), {**batch, "input_ids": batch["input_ids"][:, 1:]})


def _rows_differ(batch):
    moved = batch["position_ids"] + torch.tensor([[0], [1]])
    _parallel("RoFormer")(batch["input_ids"], position_ids=moved)


def _shards_differ(batch):
    rows = 1 + c10d.get_rank()
    _parallel("Bloom")(batch["input_ids"][:rows])


def _memory(batch):
    states = torch.ones(2, 5, 32, dtype=torch.float64)
    _logits("Mvp", _parallel("Mvp"), batch, encoder_hidden_states=states)


REFUSED = {
    _weights: "asked for its attention weights",
    _mask: r"is given attention_mask, a tensor \[2, 1, 1, 8\]",
    _triangle: "Attention has a causal mask of its own",
    _uncounted: "called without position_ids",
    _counted_alike: "called without position_ids",
    _longer: "MusicgenSinusoidalPositionalEmbedding was called with other positions",
    _rows_differ: "the same positions for all rows",
    _shards_differ: "the ranks differ",
    _memory: r"is given key_value_states, a tensor \[2, 5, 32\]",
}


def _see():
    """Return what is said of an image, where text alone goes through."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "intermediate_size": 16, "image_size": 8, "patch_size": 4}
    torch.manual_seed(3)
    config = transformers.GitConfig(
        vision_config=vision, **SIZES, hidden_act="gelu", bos_token_id=1, eos_token_id=2
    )
    plain = transformers.GitForCausalLM(config).double().eval()
    world, whole = c10d.group.WORLD, _batch(2)
    expected = plain(whole["input_ids"]).logits
    model = apply_context_parallel(copy.deepcopy(plain), world, layout="contiguous")
    sequences = ShardedSequences(LENGTH, layout="contiguous", group=world)
    batch = sequences.shard(whole)
    error = relative_error(sequences.unshard(_logits("Git", model, batch)), expected)
    with pytest.raises(InvalidArgumentError) as refused:
        _logits("Git", model, batch, pixel_values=torch.ones(2, 3, 8, 8, dtype=torch.float64))
    return error, str(refused.value)


def test_a_tower_is_refused_when_it_is_called():
    preload("transformers")
    for error, said in run_ranks(_see, 2, timeout=240):
        assert error < 1e-12
        assert "GitVisionModel is run, and text alone can be divided" in said


def _parallel(name):
    return apply_context_parallel(_build(name), c10d.group.WORLD, layout="contiguous")


def _refuse():
    return words_of(REFUSED, _batch(2))


def test_what_would_be_of_a_shard_is_refused():
    preload("transformers")
    require_words(REFUSED, run_ranks(_refuse, 2, timeout=240))

"""Known families of which a part stays whole on every rank, as data.

Layers that keep a state (of a recurrence or a convolution) stay whole, and attention whose heads
are not apart: one key for all queries, slopes that are made for all heads at once. What needs the
MLP alone comes last: the names of others' MLPs are among it.
"""

from __future__ import annotations

from ..cuts.fused import Fused
from ..cuts.stacked import Slices, Stacked
from .family import Family
from .plan import Divide, Plan, Style

_HEAD: Plan = {"**.lm_head": "column_gather"}
_QKV = ("q_proj", "k_proj", "v_proj")


def _attention(where: str, row: str = "o_proj") -> dict[str, Style]:
    columns = {f"{where}.{name}": "column" for name in _QKV}
    divided = Divide("num_attention_heads", "num_key_value_heads", optional=True)
    return {where: divided, **columns, f"{where}.{row}": "row"}


def _gated(where: str) -> dict[str, Style]:
    columns = {f"{where}.{name}_proj": "column" for name in ("gate", "up")}
    return {**columns, f"{where}.down_proj": "row"}


BAMBA = Family(
    name="Bamba",  # and Falcon-H1
    plan={
        "**.embed_tokens": "vocab",
        **_attention("**.layers.*.self_attn"),
        **_gated("**.layers.*.feed_forward"),
        **_HEAD,
    },
    may_lack=frozenset({"**.embed_tokens", "**.lm_head"}),
    complete=("**.layers.*.self_attn", "**.layers.*.feed_forward"),
    heads={"**.layers.*.self_attn": _QKV},
)

RECURRENT_GEMMA = Family(
    name="RecurrentGemma",
    plan={
        "**.embed_tokens": "vocab",
        **_attention("**.layers.*.temporal_block"),
        **_gated("**.layers.*.mlp_block"),
        **_HEAD,
    },
    may_lack=frozenset({"**.embed_tokens", "**.lm_head"}),
    complete=("**.layers.*.mlp_block",),
    heads={"**.layers.*.temporal_block": _QKV},
)

# One block of attention that several layers share.
ZAMBA = Family(
    name="Zamba",
    plan={
        "**.embed_tokens": "vocab",
        **_attention("**.layers.*.shared_transf.self_attn"),
        **_gated("**.layers.*.shared_transf.feed_forward"),
        **_HEAD,
    },
    may_lack=frozenset({"**.embed_tokens", "**.lm_head"}),
    complete=("**.layers.*.shared_transf.self_attn", "**.layers.*.shared_transf.feed_forward"),
    heads={"**.layers.*.shared_transf.self_attn": _QKV},
)

# Its MLP stays whole: each layer adds low-rank adapters to what its first layer returns.
ZAMBA2 = Family(
    name="Zamba2",
    plan={
        "**.embed_tokens": "vocab",
        **_attention("**.layers.*.shared_transformer.self_attn"),
        **_HEAD,
    },
    may_lack=frozenset({"**.embed_tokens", "**.lm_head"}),
    complete=("**.layers.*.shared_transformer.self_attn",),
    heads={"**.layers.*.shared_transformer.self_attn": _QKV},
)

LFM3 = Family(
    name="LFM3",
    plan={
        "**.embed_tokens": "vocab",
        **_attention("**.layers.*.self_attn"),
        "**.layers.*.self_attn.g_proj": "column",  # a feature for each head
        "**.layers.*.feed_forward.w1": "column",
        "**.layers.*.feed_forward.w3": "column",
        "**.layers.*.feed_forward.w2": "row",
        **_HEAD,
    },
    may_lack=frozenset({"**.embed_tokens", "**.lm_head", "**.layers.*.self_attn.g_proj"}),
    complete=("**.layers.*.self_attn", "**.layers.*.feed_forward"),
    heads={"**.layers.*.self_attn": (*_QKV, "g_proj")},
)

MOSHI = Family(
    name="Moshi",
    plan={
        "**.embed_tokens": "vocab",
        "**.layers.*.self_attn": "sharded",
        **{f"**.layers.*.self_attn.{name}.linear": "column" for name in _QKV},
        "**.layers.*.self_attn.o_proj.linear": "row",
        "**.layers.*.mlp.fc1": Fused("column", 2),
        "**.layers.*.mlp.fc2": "row",
        **_HEAD,
    },
    may_lack=frozenset({"**.embed_tokens", "**.lm_head"}),
    complete=("**.layers.*.self_attn", "**.layers.*.mlp"),
    heads={"**.layers.*.self_attn": tuple(f"{name}.linear" for name in _QKV)},
)

# Its attention mixes tokens and heads by convolutions.
ZAYA = Family(
    name="Zaya",
    plan={
        "**.embed_tokens": "vocab",
        "**.layers.*.mlp.experts": Stacked({"gate_up_proj": Slices(1, parts=2), "down_proj": 2}),
        "**.layers.*.mlp.gate": "sequence",
        "**.layers.*.self_attn.qk_norm": "sequence",
        **_HEAD,
    },
    may_lack=frozenset({"**.embed_tokens", "**.lm_head"}),
)

# Queries of its attention are made by experts, and go back to these: it stays whole.
JETMOE = Family(
    name="JetMoE",
    plan={
        "**.embed_tokens": "vocab",
        "**.layers.*.mlp": "sequence_whole",  # its layers know nothing but each expert's tokens
        "**.layers.*.mlp.input_linear": Stacked({"weight": Slices(1, parts=2)}, leaves=False),
        "**.layers.*.mlp.output_linear": Stacked({"weight": 2}, enters=False),
        "**.layers.*.self_attention": "sequence_whole",
        **_HEAD,
    },
    may_lack=frozenset({"**.embed_tokens", "**.lm_head"}),
)

BLOOM = Family(
    name="Bloom",
    plan={
        "**.word_embeddings": "vocab",
        "**.h.*.mlp.dense_h_to_4h": "column",
        "**.h.*.mlp.dense_4h_to_h": "row",
        "**.h.*": "sequence_layer",
        **_HEAD,
    },
    may_lack=frozenset({"**.word_embeddings", "**.lm_head"}),
    complete=("**.h.*.mlp",),
    foreign=frozenset({"slow_but_exact"}),  # by slices of a weight, which is a shard
)

MPT = Family(
    name="MPT",
    plan={
        "**.wte": "vocab",
        "**.blocks.*.ffn.up_proj": "column",
        "**.blocks.*.ffn.down_proj": "row",
        "**.blocks.*": "sequence_layer",
        **_HEAD,
    },
    may_lack=frozenset({"**.wte", "**.lm_head"}),
    complete=("**.blocks.*.ffn",),
)

# All its experts lie in one matrix, and keys are fewer than queries in one weight: both stay whole.
DBRX = Family(
    name="DBRX",
    plan={
        "**.wte": "vocab",
        "**.blocks.*.norm_attn_norm.attn.Wqkv": "sequence",
        "**.blocks.*": "sequence_layer",
        **_HEAD,
    },
    may_lack=frozenset({"**.wte", "**.lm_head"}),
)

# Its queries, keys and values lie in four parts for as many devices, which it computes at once.
CODEGEN = Family(
    name="CodeGen",
    plan={
        "**.wte": "vocab",
        "**.h.*.attn.qkv_proj": "sequence",
        "**.h.*.mlp.fc_in": "column",
        "**.h.*.mlp.fc_out": "row",
        "**.h.*": "sequence_layer",
        **_HEAD,
    },
    may_lack=frozenset({"**.wte", "**.lm_head"}),
    complete=("**.h.*.mlp",),
)

GPT_BIGCODE = Family(
    name="GPT-BigCode",
    plan={
        "**.wte": "vocab",
        "**.h.*.attn.c_attn": "sequence",
        "**.h.*.mlp.c_fc": "column",
        "**.h.*.mlp.c_proj": "row",
        **_HEAD,
    },
    may_lack=frozenset({"**.wte", "**.lm_head"}),
    complete=("**.h.*.mlp",),
)

# Each head is weighed against one of the other half, by vectors that all of them share.
DIFF_LLAMA = Family(
    name="DiffLlama",
    plan={
        "**.embed_tokens": "vocab",
        "**.layers.*.mlp.gate_proj": "column",
        "**.layers.*.mlp.up_proj": "column",
        "**.layers.*.mlp.down_proj": "row",
        **_HEAD,
    },
    may_lack=frozenset({"**.embed_tokens", "**.lm_head"}),
    complete=("**.layers.*.mlp",),
    foreign=frozenset({"ffn_sub_norm"}),  # BitNet, whose norm is of all features of an MLP
)

# BigBird, too, which makes its attention anew as it runs.
BERT_MLP = Family(
    name="BERT with attention left whole",
    plan={
        "**.layer.*.intermediate.dense": "column",
        "**.layer.*.output.dense": "row",
        "**.encoder": "sequence_join",
    },
    may_lack=frozenset({"**.encoder"}),
    complete=("**.layer.*.intermediate",),
)

# The state of its other layers passes along the sequence.
XLSTM = Family(
    name="xLSTM",
    plan={
        "**.blocks.*.ffn.proj_up_gate": "column",
        "**.blocks.*.ffn.proj_up": "column",
        "**.blocks.*.ffn.proj_up_gate_z": Fused("column", 2),  # both in one weight
        "**.blocks.*.ffn.proj_down": "row",
        "**.blocks.*.mlstm_layer": "sequence_whole",
        "**.blocks.*": "sequence_layer",
        **_HEAD,
    },
    may_lack=frozenset(
        {
            "**.blocks.*.ffn.proj_up_gate",
            "**.blocks.*.ffn.proj_up",
            "**.blocks.*.ffn.proj_up_gate_z",
            "**.lm_head",
        }
    ),
    complete=("**.blocks.*.ffn",),
)

PARTIAL = (
    BAMBA,
    RECURRENT_GEMMA,
    ZAMBA,
    ZAMBA2,
    LFM3,
    MOSHI,
    ZAYA,
    JETMOE,
    BLOOM,
    MPT,
    DBRX,
    CODEGEN,
    GPT_BIGCODE,
    DIFF_LLAMA,
    BERT_MLP,
    XLSTM,
)

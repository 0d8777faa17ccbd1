"""Known families of dense models, as data, beside those whose layers many others share."""

from __future__ import annotations

from dataclasses import replace

from ..cuts.fused import Fused
from .family import Family
from .plan import Divide

# Attention and the layers behind it have a module each, and norms of whole states beside the rows.
BERT = Family(
    name="BERT",
    plan={
        "**.layer.*.attention.self": Divide(
            "num_attention_heads", "all_head_size", "num_heads", optional=True
        ),
        "**.layer.*.attention.self.query": "column",
        "**.layer.*.attention.self.key": "column",
        "**.layer.*.attention.self.value": "column",
        "**.layer.*.attention.output.dense": "row",
        "**.layer.*.intermediate.LayerNorm": "sequence",  # of whole states, if it is in front
        "**.layer.*.intermediate.dense": "column",
        "**.layer.*.output.dense": "row",
        "**.encoder": "sequence_join",  # what follows takes single tokens of the whole, or all
    },
    may_lack=frozenset({"**.layer.*.intermediate.LayerNorm", "**.encoder"}),
    complete=("**.layer.*.attention.self", "**.layer.*.intermediate"),
    foreign=frozenset({"num_random_blocks"}),  # BigBird, which makes its attention anew as it runs
    heads={"**.layer.*.attention.self": ("query", "key", "value")},
)

# Its tables of positions are made for the length of the hidden states.
ROFORMER = replace(
    BERT,
    name="RoFormer",
    plan={
        **{name: style for name, style in BERT.plan.items() if name != "**.encoder"},
        "**.encoder.layer.*": "sequence_layer",
        "**.embed_positions": "sequence",
    },
)

_HEADS = ("**.embed_tokens", "**.lm_head", "**.output_projection", "**.proj_out")
BART = Family(
    name="BART",
    plan={
        "**.embed_tokens": "vocab",
        "**.embed_positions": "sequence_positions",
        "**.layers.*.self_attn": Divide("num_heads", "embed_dim", optional=True),
        "**.layers.*.self_attn.q_proj": "column",
        "**.layers.*.self_attn.k_proj": "column",
        "**.layers.*.self_attn.v_proj": "column",
        "**.layers.*.self_attn.out_proj": "row",
        "**.layers.*.encoder_attn": Divide("num_heads", "embed_dim", optional=True),
        "**.layers.*.encoder_attn.q_proj": "column",
        "**.layers.*.encoder_attn.k_proj": "column",
        "**.layers.*.encoder_attn.v_proj": "column",
        "**.layers.*.encoder_attn.out_proj": "row",
        "**.layers.*.fc1": "column",
        "**.layers.*.fc2": "row",
        "**.lm_head": "column_gather",
        "**.output_projection": "column_gather",
        "**.proj_out": "column_gather",
    },
    may_lack=frozenset(
        {
            "**.embed_tokens",
            "**.embed_positions",
            "**.lm_head",
            "**.output_projection",
            "**.proj_out",
            "**.layers.*.encoder_attn",
            *(f"**.layers.*.encoder_attn.{name}_proj" for name in ("q", "k", "v", "out")),
        }
    ),
    complete=("**.layers.*.self_attn", "**.layers.*.encoder_attn"),
    foreign=frozenset({"kdim"}),  # TrOCR, which reshapes by the width of hidden states
    heads={
        "**.layers.*.self_attn": ("q_proj", "k_proj", "v_proj"),
        "**.layers.*.encoder_attn": ("q_proj", "k_proj", "v_proj"),
    },
)

# A table and a head for each code book.
MUSICGEN = replace(
    BART,
    name="MusicGen",
    plan={
        **{name: style for name, style in BART.plan.items() if name not in _HEADS},
        "**.embed_positions": "sequence",
        "**.layers.*": "sequence_layer",
        "**.embed_tokens.*": "vocab",
        "**.lm_heads.*": "column_gather",
    },
)

GPT_J = Family(
    name="GPT-J",
    plan={
        "**.wte": "vocab",
        "**.h.*.attn": Divide("num_attention_heads", "embed_dim", optional=True),
        "**.h.*.attn.q_proj": "column",
        "**.h.*.attn.k_proj": "column",
        "**.h.*.attn.v_proj": "column",
        "**.h.*.attn.out_proj": "row",
        "**.h.*.mlp.fc_in": "column",
        "**.h.*.mlp.fc_out": "row",
        "**.lm_head": "column_gather",
    },
    may_lack=frozenset({"**.wte", "**.lm_head"}),
    complete=("**.h.*.attn", "**.h.*.mlp"),
    heads={"**.h.*.attn": ("q_proj", "k_proj", "v_proj")},
)

GPT_NEO = Family(
    name="GPT-Neo",
    plan={
        "**.wte": "vocab",
        "**.h.*.attn.attention": Divide("num_heads", "embed_dim", optional=True),
        "**.h.*.attn.attention.q_proj": "column",
        "**.h.*.attn.attention.k_proj": "column",
        "**.h.*.attn.attention.v_proj": "column",
        "**.h.*.attn.attention.out_proj": "row",
        "**.h.*.mlp.c_fc": "column",
        "**.h.*.mlp.c_proj": "row",
        "**.lm_head": "column_gather",
    },
    may_lack=frozenset({"**.wte", "**.lm_head"}),
    complete=("**.h.*.attn.attention", "**.h.*.mlp"),
    heads={"**.h.*.attn.attention": ("q_proj", "k_proj", "v_proj")},
)

MODERN_BERT = Family(
    name="ModernBERT decoder",
    plan={
        "**.layers.*.attn": Divide("num_heads", "all_head_size", optional=True),
        "**.layers.*.attn.q_proj": "column",
        "**.layers.*.attn.k_proj": "column",
        "**.layers.*.attn.v_proj": "column",
        "**.layers.*.attn.Wo": "row",
        "**.layers.*.mlp.Wi": Fused("column", 2),
        "**.layers.*.mlp.Wo": "row",
    },
    complete=("**.layers.*.attn", "**.layers.*.mlp"),
    heads={"**.layers.*.attn": ("q_proj", "k_proj", "v_proj")},
)

# Its short convolutions, which mix tokens, stay whole on every rank.
LFM2 = Family(
    name="LFM2",
    plan={
        "**.embed_tokens": "vocab",
        "**.layers.*.self_attn": Divide("num_heads", "num_key_value_heads", optional=True),
        "**.layers.*.self_attn.q_proj": "column",
        "**.layers.*.self_attn.k_proj": "column",
        "**.layers.*.self_attn.v_proj": "column",
        "**.layers.*.self_attn.out_proj": "row",
        "**.layers.*.feed_forward.w1": "column",
        "**.layers.*.feed_forward.w3": "column",
        "**.layers.*.feed_forward.w2": "row",
        "**.lm_head": "column_gather",
    },
    may_lack=frozenset({"**.embed_tokens", "**.lm_head"}),
    complete=("**.layers.*.self_attn", "**.layers.*.feed_forward"),
    heads={"**.layers.*.self_attn": ("q_proj", "k_proj", "v_proj")},
)

VIT = Family(
    name="ViT",
    plan={
        "**.layers.*": "sequence_layer",  # what is before and behind them takes patches apart
        "**.layers.*.attention": Divide("num_attention_heads", "num_heads", optional=True),
        "**.layers.*.attention.q_proj": "column",
        "**.layers.*.attention.k_proj": "column",
        "**.layers.*.attention.v_proj": "column",
        "**.layers.*.attention.o_proj": "row",
        "**.layers.*.mlp.fc1": "column",
        "**.layers.*.mlp.fc2": "row",
    },
    complete=("**.layers.*.attention", "**.layers.*.mlp"),
    heads={"**.layers.*.attention": ("q_proj", "k_proj", "v_proj")},
)

CLIP = Family(
    name="CLIP",
    plan={
        "**.token_embedding": "vocab",
        "**.layers.*.self_attn": Divide("num_heads", "embed_dim", optional=True),
        "**.layers.*.self_attn.q_proj": "column",
        "**.layers.*.self_attn.k_proj": "column",
        "**.layers.*.self_attn.v_proj": "column",
        "**.layers.*.self_attn.out_proj": "row",
        "**.layers.*.mlp.fc1": "column",
        "**.layers.*.mlp.fc2": "row",
        "**.final_layer_norm": "sequence_join",  # what follows takes one token of the whole
    },
    may_lack=frozenset({"**.token_embedding", "**.final_layer_norm"}),
    complete=("**.layers.*.self_attn", "**.layers.*.mlp"),
    heads={"**.layers.*.self_attn": ("q_proj", "k_proj", "v_proj")},
)

# Biases of attention, one for each head, are the first layer's, which passes them on.
_OF_T5 = tuple(f"**.block.*.layer.*.{name}" for name in ("SelfAttention", "EncDecAttention"))
_BIAS = "relative_attention_bias"
_MLP = "**.block.*.layer.*.DenseReluDense"
T5 = Family(
    name="T5",
    plan={
        "**.shared": "vocab",
        "**.embed_tokens": "vocab",
        **dict.fromkeys(_OF_T5, Divide("n_heads", "inner_dim")),
        **{f"{attention}.{name}": "column" for attention in _OF_T5 for name in "qkv"},
        **{f"{attention}.o": "row" for attention in _OF_T5},
        **{f"{attention}.{_BIAS}": "column_embedding" for attention in _OF_T5},
        **{f"{_MLP}.{name}": "column" for name in ("wi", "wi_0", "wi_1")},
        f"{_MLP}.wo": "row",
        "**.lm_head": "column_gather",
    },
    may_lack=frozenset(
        {
            *("**.shared", "**.embed_tokens", "**.lm_head"),
            *(f"{attention}.{_BIAS}" for attention in _OF_T5),
            *(_OF_T5[1], *(f"{_OF_T5[1]}.{name}" for name in "qkvo")),  # an encoder has none
            *(f"{_MLP}.{name}" for name in ("wi", "wi_0", "wi_1")),
        }
    ),
    complete=(*_OF_T5, _MLP),
    heads=dict.fromkeys(_OF_T5, ("q", "k", "v")),
)

DENSE = (ROFORMER, BERT, MUSICGEN, BART, GPT_J, GPT_NEO, MODERN_BERT, LFM2, VIT, CLIP, T5)

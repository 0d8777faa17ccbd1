"""Known families of which attention stays whole on every rank, as data: their MLPs are cut.

Heads of such attention are not apart, or it reshapes by the width of hidden states, which no rank's
share of the heads fits.
"""

from __future__ import annotations

from ..cuts.fused import Fused
from .family import Family
from .plan import Plan

_HEAD: Plan = {"**.lm_head": "column_gather"}

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

# TrOCR's attention, whose keys and values may have another width than its queries.
BART_MLP = Family(
    name="BART with attention left whole",
    plan={
        "**.embed_tokens": "vocab",
        "**.embed_positions": "sequence_positions",
        "**.layers.*.fc1": "column",
        "**.layers.*.fc2": "row",
        "**.layers.*": "sequence_layer",
        "**.lm_head": "column_gather",
        "**.output_projection": "column_gather",
    },
    may_lack=frozenset(
        {"**.embed_tokens", "**.embed_positions", "**.lm_head", "**.output_projection"}
    ),
)

PROPHET_NET = Family(
    name="ProphetNet",
    plan={
        "**.layers.*.feed_forward.intermediate": "column",
        "**.layers.*.feed_forward.output": "row",
        "**.layers.*": "sequence_layer",
    },
    complete=("**.layers.*.feed_forward",),
)

REFORMER = Family(
    name="Reformer",
    plan={
        "**.layers.*.feed_forward.layer_norm": "sequence",
        "**.layers.*.feed_forward.dense.dense": "column",
        "**.layers.*.feed_forward.output.dense": "row",
    },
    complete=("**.layers.*.feed_forward",),
    wants_whole="compute the gradients of their reversible layers themselves, from whole outputs",
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

MLPS = (DIFF_LLAMA, BERT_MLP, BART_MLP, PROPHET_NET, REFORMER, XLSTM)

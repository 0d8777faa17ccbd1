"""Known model families as data: names of modules, and the plan for models that have them.

What a model of transformers says of itself comes first (`transformers_plan`); these are for models
that say nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from ....dist.errors import InvalidArgumentError
from ...pg_manager.building import matching
from ..cuts.styles import Fused, PerHead, Slices, Stacked
from .plan import Divide, Match, Plan, Style, match_plan

_OPTIONAL = ("vocab", "column_gather")  # not every model has a table of words and a head


@dataclass(frozen=True, slots=True)
class Family:
    """A plan for every model whose modules have these names.

    Args:
        name: What messages call it.
        plan: Patterns and styles. Tables of words and heads need not match.
        may_lack: Further patterns that need not match.
        foreign: Attributes or submodules, unless they are `False`, by which attention or an MLP
            says that it computes otherwise.
    """

    name: str
    plan: Plan
    may_lack: frozenset[str] = frozenset()
    foreign: frozenset[str] = frozenset()

    @property
    def heads(self) -> tuple[str, ...]:
        """Patterns of attention, whose projections are cut at head borders."""
        return tuple(p for p, style in self.plan.items() if isinstance(style, Divide | PerHead))

    @property
    def regions(self) -> tuple[str, ...]:
        """Patterns of attention and MLPs: of modules that have column-parallel layers."""
        columns = (p for p, s in self.plan.items() if getattr(s, "style", s) == "column")
        return tuple(dict.fromkeys(pattern.rpartition(".")[0] for pattern in columns))

    def lacks(self, names: Iterable[str]) -> bool:
        """Return whether a model with modules of these names is of another family."""
        names = [*names]
        needed = (p for p, s in self.plan.items() if s not in _OPTIONAL and p not in self.may_lack)
        return any(not matching(pattern, names) for pattern in needed)


class Recognised(NamedTuple):
    """What is known of a model for which no plan was given.

    Attributes:
        matches: What is sharded.
        heads: Names of attention modules, whose projections are cut at head borders.
    """

    matches: list[Match]
    heads: Sequence[str]


_QKV = ("q_proj", "k_proj", "v_proj")
_GATED = ("gate_proj", "up_proj")
_HEAD: Plan = {"**.lm_head": "column_gather"}


def _divide(*attributes: str) -> Divide:
    return Divide(*attributes, optional=True)


def _linear(where: str, columns: Sequence[str], row: str, parts: int = 1) -> dict[str, Style]:
    """Return the styles of a module's projections, each of so many packed parts, and its output."""
    column: Style = "column" if parts == 1 else Fused("column", parts)
    return {**{f"{where}.{name}": column for name in columns}, f"{where}.{row}": "row"}


_BART_CROSS = {
    "**.layers.*.encoder_attn": _divide("num_heads", "embed_dim"),
    **_linear("**.layers.*.encoder_attn", _QKV, "out_proj"),
}

_T5_SELF, _T5_CROSS = (f"**.block.*.layer.*.{name}Attention" for name in ("Self", "EncDec"))
_T5_MLP = "**.block.*.layer.*.DenseReluDense"
_T5_BIAS = "relative_attention_bias"  # of each head: the first layer's, which passes it on
_T5_OPTIONAL: Plan = {
    **{f"{where}.{_T5_BIAS}": "column_embedding" for where in (_T5_SELF, _T5_CROSS)},
    _T5_CROSS: Divide("n_heads", "inner_dim"),  # an encoder has none
    **_linear(_T5_CROSS, "qkv", "o"),
    **{f"{_T5_MLP}.{name}": "column" for name in ("wi", "wi_0", "wi_1")},
}

FAMILIES: tuple[Family, ...] = (
    Family(
        "Llama",
        {
            "**.embed_tokens": "vocab",
            "**.layers.*.self_attn": _divide("num_heads", "num_kv_heads", "num_key_value_heads"),
            **_linear("**.layers.*.self_attn", _QKV, "o_proj"),
            **_linear("**.layers.*.mlp", _GATED, "down_proj"),
            **_HEAD,
        },
        # DiffLlama weighs heads against others; BitNet norms the features of all heads.
        foreign=frozenset({"lambda_init", "attn_sub_norm"}),
    ),
    Family(
        "GPT-2",
        {
            "**.wte": "vocab",
            "**.tokens_embed": "vocab",  # of the first GPT
            "**.h.*.attn": _divide("num_heads", "n_head", "split_size", "embed_dim", "n_embd"),
            **_linear("**.h.*.attn", ("c_attn",), "c_proj", parts=3),
            **_linear("**.h.*.mlp", ("c_fc",), "c_proj"),
            "**.h.*": "sequence_layer",  # what follows reshapes by the whole length
            **_HEAD,
        },
        foreign=frozenset({"kv_dim"}),  # GPT-BigCode: one key and value head, or head by head
    ),
    Family(
        "GPT-NeoX",
        {
            "**.embed_in": "vocab",
            "**.layers.*.attention": _divide("num_attention_heads", "num_heads", "hidden_size"),
            # Query, key and value of one head follow one another: cut between heads.
            **_linear("**.layers.*.attention", ("query_key_value",), "dense"),
            **_linear("**.layers.*.mlp", ("dense_h_to_4h",), "dense_4h_to_h"),
            "**.embed_out": "column_gather",
            **_HEAD,  # what newer models call it
        },
    ),
    Family(
        "gpt-oss",
        {
            "**.embed_tokens": "vocab",
            "**.layers.*.self_attn": PerHead("sinks"),
            **_linear("**.layers.*.self_attn", _QKV, "o_proj"),
            "**.layers.*.mlp.experts": Stacked(
                {
                    "gate_up_proj": Slices(2, unit=2),  # [experts, in, gate and up by turns]
                    "gate_up_proj_bias": Slices(1, unit=2),
                    "down_proj": 1,
                },
                added=("down_proj_bias",),
            ),
            "**.layers.*.mlp.router": "sequence",
            **_HEAD,
        },
    ),
    # Attention and the layers behind it have a module each, and norms of whole states beside rows.
    Family(
        "BERT",
        {
            "**.layer.*.attention.self": _divide(
                "num_attention_heads", "all_head_size", "num_heads"
            ),
            **{f"**.layer.*.attention.self.{name}": "column" for name in ("query", "key", "value")},
            "**.layer.*.attention.output.dense": "row",
            "**.layer.*.intermediate.LayerNorm": "sequence",  # of whole states, if it is in front
            "**.layer.*.intermediate.dense": "column",
            "**.layer.*.output.dense": "row",
            "**.layer.*": "sequence_layer",  # what follows takes single tokens of the whole, or all
        },
        may_lack=frozenset({"**.layer.*.intermediate.LayerNorm"}),
        foreign=frozenset({"num_random_blocks"}),  # BigBird, which makes its attention as it runs
    ),
    Family(
        "BART",  # and OPT, Whisper, Pegasus
        {
            "**.embed_tokens": "vocab",
            "**.layers.*.self_attn": _divide("num_heads", "embed_dim"),
            **_linear("**.layers.*.self_attn", _QKV, "out_proj"),
            **_BART_CROSS,
            "**.layers.*.fc1": "column",
            "**.layers.*.fc2": "row",
            "**.layers.*": "sequence_layer",  # before them it counts positions
            "**.output_projection": "column_gather",
            "**.proj_out": "column_gather",
            **_HEAD,
        },
        may_lack=frozenset(_BART_CROSS),
        foreign=frozenset({"kdim"}),  # TrOCR, which reshapes by the width of hidden states
    ),
    Family(
        "GPT-J",
        {
            "**.wte": "vocab",
            "**.h.*.attn": _divide("num_attention_heads", "embed_dim"),
            **_linear("**.h.*.attn", _QKV, "out_proj"),
            **_linear("**.h.*.mlp", ("fc_in",), "fc_out"),
            **_HEAD,
        },
    ),
    Family(
        "GPT-Neo",
        {
            "**.wte": "vocab",
            "**.h.*.attn.attention": _divide("num_heads", "embed_dim"),
            **_linear("**.h.*.attn.attention", _QKV, "out_proj"),
            **_linear("**.h.*.mlp", ("c_fc",), "c_proj"),
            **_HEAD,
        },
    ),
    Family(
        "ModernBERT decoder",
        {
            "**.layers.*.attn": _divide("num_heads", "all_head_size"),
            **_linear("**.layers.*.attn", _QKV, "Wo"),
            **_linear("**.layers.*.mlp", ("Wi",), "Wo", parts=2),
        },
    ),
    # Short convolutions, which mix tokens, stay whole on every rank.
    Family(
        "LFM2",
        {
            "**.embed_tokens": "vocab",
            "**.layers.*.self_attn": _divide("num_heads", "num_key_value_heads"),
            **_linear("**.layers.*.self_attn", _QKV, "out_proj"),
            **_linear("**.layers.*.feed_forward", ("w1", "w3"), "w2"),
            **_HEAD,
        },
    ),
    Family(
        "LFM3",
        {
            "**.embed_tokens": "vocab",
            "**.layers.*.self_attn": _divide("num_attention_heads", "num_key_value_heads"),
            **_linear("**.layers.*.self_attn", (*_QKV, "g_proj"), "o_proj"),
            **_linear("**.layers.*.feed_forward", ("w1", "w3"), "w2"),
            **_HEAD,
        },
        may_lack=frozenset({"**.layers.*.self_attn.g_proj"}),  # a gate: a feature for each head
    ),
    Family(
        "ViT",
        {
            "**.layers.*": "sequence_layer",  # what is before and behind them takes patches apart
            "**.layers.*.attention": _divide("num_attention_heads", "num_heads"),
            **_linear("**.layers.*.attention", _QKV, "o_proj"),
            **_linear("**.layers.*.mlp", ("fc1",), "fc2"),
        },
    ),
    Family(
        "CLIP",
        {
            "**.token_embedding": "vocab",
            "**.layers.*.self_attn": _divide("num_heads", "embed_dim"),
            **_linear("**.layers.*.self_attn", _QKV, "out_proj"),
            **_linear("**.layers.*.mlp", ("fc1",), "fc2"),
            "**.layers.*": "sequence_layer",  # what follows takes one token of the whole
        },
    ),
    Family(
        "T5",
        {
            "**.shared": "vocab",
            "**.embed_tokens": "vocab",
            _T5_SELF: Divide("n_heads", "inner_dim"),
            **_linear(_T5_SELF, "qkv", "o"),
            f"{_T5_MLP}.wo": "row",
            **_T5_OPTIONAL,
            **_HEAD,
        },
        may_lack=frozenset(_T5_OPTIONAL),
    ),
    # Layers that keep a state stay whole.
    Family(
        "Bamba",  # and Falcon-H1
        {
            "**.embed_tokens": "vocab",
            "**.layers.*.self_attn": _divide("num_attention_heads", "num_key_value_heads"),
            **_linear("**.layers.*.self_attn", _QKV, "o_proj"),
            **_linear("**.layers.*.feed_forward", _GATED, "down_proj"),
            **_HEAD,
        },
    ),
    # Attention stays whole: slopes that are made for all heads at once.
    Family(
        "Bloom",  # and Falcon
        {
            "**.word_embeddings": "vocab",
            **_linear("**.h.*.mlp", ("dense_h_to_4h",), "dense_4h_to_h"),
            "**.h.*": "sequence_layer",
            **_HEAD,
        },
        foreign=frozenset({"slow_but_exact"}),  # by slices of a weight, which is a shard
    ),
    # One key for all queries.
    Family(
        "GPT-BigCode",
        {
            "**.wte": "vocab",
            "**.h.*.attn.c_attn": "sequence",
            **_linear("**.h.*.mlp", ("c_fc",), "c_proj"),
            **_HEAD,
        },
    ),
)


def _foreign(model: nn.Module, family: Family, names: Sequence[str]) -> str | None:
    """Return which module of the family's names has other parts or parameters, or None."""
    for name in (n for pattern in family.regions for n in matching(pattern, names)):
        module = model.get_submodule(name)
        own = {**vars(module), **module._modules}
        found = [each for each in sorted(family.foreign) if own.get(each, False) is not False]
        if found:
            return f"'{name}' has {', '.join(found)}: it computes otherwise"
    for pattern, style in family.plan.items():
        needed = {*getattr(style, "names", ()), *getattr(style, "sharded", ())}
        for name in matching(pattern, names) if needed else ():
            lacking = sorted(needed - {*model.get_submodule(name)._parameters})
            if lacking:
                return f"'{name}' has no parameter {', '.join(lacking)}"
    return None


class UnplannedError(InvalidArgumentError):
    """A model for which no plan was given has none of its own, and is of no known family."""


def find_family(model: nn.Module) -> Recognised | None:
    """Find the known family whose names the model has, and match its plan, if there is one."""
    names = _names(model)
    for family in FAMILIES:
        if not family.lacks(names) and _foreign(model, family, names) is None:
            optional = frozenset(p for p, style in family.plan.items() if style in _OPTIONAL)
            matches = match_plan(model, family.plan, optional | family.may_lack)
            heads = [name for pattern in family.heads for name in matching(pattern, names)]
            return Recognised(matches, heads)
    return None


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules(remove_duplicate=False)]


def unplanned(model: nn.Module, tp_size: int) -> InvalidArgumentError:
    """Return the error of a model that has no plan, which says how to get one."""
    name, names = type(model).__name__, _names(model)
    alike = next((family for family in FAMILIES if not family.lacks(names)), None)
    other = "" if alike is None else f": {alike.name} has such names, but "
    other += "" if alike is None else str(_foreign(model, alike, names))
    return UnplannedError(
        f"{name} has no plan of its own for its layers (_tp_plan of transformers), and is of no "
        f"known model family{other}; pass plan=suggest_plan(model, example), which finds one by a "
        "forward of what the model takes, or complete the one that print(explain(model, "
        f"{tp_size})) writes (both of scaletorch.parallel.tensor_parallel), or leave tp_size at 1 "
        "and use the other axes"
    )

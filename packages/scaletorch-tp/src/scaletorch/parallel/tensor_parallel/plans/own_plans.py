"""Read a model's own tensor-parallel plan: of transformers, or for layers of `torch.nn`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from torch import nn

from ....dist.errors import InvalidArgumentError
from ..styles import Divide, Fused, PerHead, SharedTail, Slices, Stacked
from .attention import SHARED_KEYS, has_heads
from .plan import Match, Matches, Style, children_of, look_up, with_outputs

PER_HEAD = "local_params"  # the style of a module whose parameters have their own styles
SHARED_TAIL = "mla_kv_a_proj"

EXPERTS = "moe_tp_experts"  # a module of stacked experts
SUMMED = "all_reduce"  # stacked shared experts
GATHERED = "gather"  # transformers 5.0: experts whose parameters have a style of `_LOCAL`
ROUTER = "ep_router"  # until 5.2 also in these plans; a router is replicated
APART = "grouped_gemm"  # 5.0: expert parallelism, not tensor parallelism
_LOCAL = ("local_colwise", "local_rowwise")  # these leave the width dim open

# A parameter's style -> its shard dim of [experts, out, in], and the number of packed matrices.
# Plans give transposed stacks the style of the other dim.
_SLICES: Mapping[str, tuple[int, int]] = {
    "colwise": (1, 1),
    "packed_colwise": (1, 2),
    "rowwise": (2, 1),
    "packed_rowwise": (2, 2),
}

# Style of transformers -> ours; others are unsupported.
TRANSFORMERS_STYLES: Mapping[str, Style] = {
    "colwise": "column",
    "colwise_gather_output": "column_gather",
    "colwise_rep": "column_gather",
    "packed_colwise": Fused("column", 2),
    "rowwise": "row",
    "rowwise_split_input": "row_split",
    **{name: name for name in ("attention", "column_embedding")},  # ours, below
    "rowwise_rep": "row_split",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "replicate",
    "replicate": "replicate",
}

# The plan of an encoder or decoder layer of `torch.nn`.
_TORCH: Mapping[str, Style] = {
    "self_attn": "attention",
    "multihead_attn": "attention",
    "linear1": "colwise",
    "linear2": "rowwise",
}
_OF_THE_HEAD = ("column_gather", "vocab", "replicate")  # a plan of only these shards no layer

# T5's stacks. The first layer has a position bias for each head, which the other layers reuse.
_T5_ATTENTION: Mapping[str, Style] = {
    "": Divide("n_heads", "inner_dim"),
    **{f".{name}": "colwise" for name in "qkv"},
    ".o": "rowwise",
    ".relative_attention_bias": "column_embedding",
}
_T5: Mapping[str, Style] = {
    "shared": "embedding_rowwise",
    "embed_tokens": "embedding_rowwise",
    **{f"block.*.layer.*.SelfAttention{name}": s for name, s in _T5_ATTENTION.items()},
    **{f"block.*.layer.*.EncDecAttention{name}": s for name, s in _T5_ATTENTION.items()},
    **{f"block.*.layer.*.DenseReluDense.{name}": "colwise" for name in ("wi", "wi_*")},
    "block.*.layer.*.DenseReluDense.wo": "rowwise",
    "lm_head": "colwise_gather_output",
}

# `model_type` -> plan of the base model, used instead of that of transformers.
_MISSING: Mapping[str, Mapping[str, Style]] = {
    **dict.fromkeys(("t5", "mt5", "umt5"), _T5),
    "gpt_oss": {
        "embed_tokens": "embedding_rowwise",
        **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.self_attn": PerHead("sinks"),
        "layers.*.mlp.experts": Stacked(
            {
                "gate_up_proj": Slices(2, unit=2),  # [experts, in, interleaved gate and up]
                "gate_up_proj_bias": Slices(1, unit=2),
                "down_proj": 1,
            },
            added=("down_proj_bias",),
        ),
    },
}


def own_plan(model: nn.Module) -> dict[str, Style]:
    """Return the plan of a model and of models inside it: name pattern -> style of transformers."""
    plan: dict[str, Style] = {}
    for name, module in model.named_modules():
        found = [getattr(module, "_tp_plan", None), _plan_of_torch(module)]
        if getattr(module, "base_model", None) is module:
            config = getattr(module, "config", None)
            missing = _MISSING.get(getattr(config, "model_type", ""))
            found.append(missing or getattr(config, "base_model_tp_plan", None))
        for patterns in found:
            for pattern, style in patterns.items() if isinstance(patterns, Mapping) else ():
                if style != ROUTER:
                    plan.setdefault(f"{name}.{pattern}".strip("."), style)
    return plan


def find_own_plan(
    model: nn.Module, divided: Collection[nn.Module] = ()
) -> tuple[list[Match], dict[str, nn.Module]] | None:
    """Match the model's own plan, without modules in `divided`; return its attention by name, too.

    Return None if the plan shards only the head, or is for expert parallelism (`APART`).
    """
    plan = own_plan(model)
    if APART in plan.values():
        return None
    modules = dict(model.named_modules(remove_duplicate=False))
    modules = {name: module for name, module in modules.items() if module not in divided}
    matches = _match(plan, modules)
    if all(match.style in _OF_THE_HEAD for match in matches.values()):
        return None
    heads = [*_attentions(modules, matches)]
    if any(sum(m.is_row for m in children_of(modules[name], matches)) > 1 for name in heads):
        return None  # the second would use only this rank's heads of the first one's output
    _add_tied(modules, matches)
    for name in heads:  # their dropout acts on this rank's heads
        matches.setdefault(modules[name], look_up(name, modules[name], name, "sharded"))
    matches = with_outputs(matches)
    ordered = [matches[module] for module in model.modules() if module in matches]
    return ordered, {name: modules[name] for name in heads}


def _pattern(plan: Mapping[str, Style], name: str) -> str | None:
    """Return the pattern that matches a name; `*` in a pattern matches only a number."""
    # Numbers in the prefix of a model inside a Sequential or list stand in patterns as they are.
    starts = [number.start() for number in re.finditer(r"\d+", name)]
    patterns = (name[:start] + re.sub(r"\d+", "*", name[start:]) for start in starts)
    return next((pattern for pattern in (name, *patterns) if pattern in plan), None)


def _match(plan: Mapping[str, Style], modules: Mapping[str, nn.Module]) -> dict[nn.Module, Match]:
    matches: dict[nn.Module, Match] = {}
    for name, module in modules.items():
        style = _style(plan, name, modules)
        if style is None:
            continue
        pattern = _pattern(plan, name) or name
        match = look_up(name, module, pattern, style)
        full = style in ("vocab", "column_gather")  # these return full outputs
        if full and match.layer is not None and not match.layer.takes(module):
            match = look_up(name, module, pattern, "replicate")  # it does more than its style
        matches.setdefault(module, match)
    return matches


def _style(plan: Mapping[str, Style], name: str, modules: Mapping[str, nn.Module]) -> Style | None:
    """Return our style for a module; None if the plan names nothing to shard in it."""
    module, pattern = modules[name], _pattern(plan, name)
    patterns = {n: _pattern(plan, f"{name}.{n}".lstrip(".")) for n in module._parameters}
    styles = {n: str(plan[found]) for n, found in patterns.items() if found is not None}
    if pattern is None:
        return _per_head(name, module, styles) if {*styles.values()} - {"replicate"} else None
    theirs = plan[pattern]
    if not isinstance(theirs, str):
        return theirs
    if theirs == EXPERTS or (theirs in (SUMMED, GATHERED) and styles):
        return stacked_of(name, module, styles)
    if theirs == PER_HEAD:
        return _per_head(name, module, styles)
    if theirs == SHARED_TAIL:
        features = vars(modules[name.rpartition(".")[0]]).get(SHARED_KEYS)
        if isinstance(features, int):
            return SharedTail(features)
    if theirs not in TRANSFORMERS_STYLES:
        raise _unknown(pattern, theirs, (*TRANSFORMERS_STYLES, EXPERTS, PER_HEAD))
    style = TRANSFORMERS_STYLES[theirs]
    rows = style == "row" and isinstance(module, nn.Embedding)
    return "vocab" if rows else style  # the rows of an embedding are the vocabulary


def _per_head(name: str, module: nn.Module, styles: Mapping[str, str]) -> PerHead | None:
    """Return the style of a module whose own parameters are sharded by heads."""
    names = [n for n, parameter in module._parameters.items() if parameter is not None]
    for n in (n for n in names if styles.get(n) != "colwise"):
        raise _unknown(f"{name}.{n}", styles.get(n), ("colwise",))
    return PerHead(*names) if names else None


def _unknown(place: str, style: str | None, known: Collection[str]) -> InvalidArgumentError:
    """Return the error for an unknown style of transformers."""
    return InvalidArgumentError(
        f"the model's own plan (_tp_plan) gives '{place}' the style {style!r}, which is none of "
        f"{', '.join(map(repr, known))}; pass a plan of your own"
    )


def _attentions(modules: Mapping[str, nn.Module], matches: Matches) -> Iterator[str]:
    """Yield the names of attention modules with sharded projections."""
    for name, module in modules.items():
        layers = children_of(module, matches)
        columns, rows = any(m.is_column for m in layers), any(m.is_row for m in layers)
        kind = f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
        named = "attn" in kind or "attention" in kind
        if columns and rows and (has_heads(module) or named):
            yield name


def _add_tied(modules: Mapping[str, nn.Module], matches: dict[nn.Module, Match]) -> None:
    """Add the layer tied to a matched embedding or head, or drop both if it cannot be sharded."""
    sharded = {m.module._parameters.get("weight") for m in matches.values() if m.layer is not None}
    styles: dict[type[nn.Module], Style] = {nn.Embedding: "vocab", nn.Linear: "column_gather"}
    for name, module in modules.items():
        style = next((s for kind, s in styles.items() if isinstance(module, kind)), None)
        if style is None or module in matches or module.weight not in sharded:
            continue
        match = look_up(name, module, name, style)
        if match.misfit is None:
            matches[module] = match
            continue
        for tied in [m for m in matches if m._parameters.get("weight") is module.weight]:
            del matches[tied]


def stacked_of(name: str, module: nn.Module, styles: Mapping[str, str]) -> Stacked:
    """Return the `Stacked` style for experts with these styles of transformers for parameters.

    The shapes of `gate_up_proj` and `down_proj` show the dim of the experts' width, and that gate
    and up are packed, which some plans leave open.
    """
    if not styles:
        raise InvalidArgumentError(
            f"the model's own plan (_tp_plan) gives the experts '{name}' a style and none of "
            f"their parameters ({', '.join(module._parameters)}); pass a plan of your own"
        )
    shown: dict[str, tuple[int, int]] = {}
    gate_up, down = (module._parameters.get(n) for n in ("gate_up_proj", "down_proj"))
    if gate_up is not None and down is not None and gate_up.ndim == down.ndim == 3:
        for own, other in ((1, 2), (2, 1)):
            if gate_up.shape[own] == 2 * down.shape[other]:
                shown = {"gate_up_proj": (own, 2), "down_proj": (other, 1)}
    sharded: dict[str, Slices | int] = {}
    for parameter, style in styles.items():
        if style not in (*_SLICES, *(_LOCAL if parameter in shown else ())):
            raise _unknown(f"{name}.{parameter}", style, _SLICES)
        dim, packed = shown.get(parameter) or _SLICES[style]
        # Gate and up in one weight are concatenated or interleaved.
        concatenated = packed == 1 or getattr(module, "is_concatenated", True)
        sharded[parameter] = Slices(dim, packed) if concatenated else Slices(dim, unit=packed)
    return Stacked(sharded)


_METHODS = ("forward", "_sa_block", "_mha_block", "_ff_block")


def _plan_of_torch(module: nn.Module) -> dict[str, Style]:
    """Return the plan of an encoder or decoder layer of `torch.nn`; empty for other modules."""
    kinds = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
    kind = next((kind for kind in kinds if isinstance(module, kind)), None)
    same = (getattr(type(module), n, None) is getattr(kind, n, None) for n in _METHODS)
    return {n: s for n, s in _TORCH.items() if n in module._modules} if all(same) else {}

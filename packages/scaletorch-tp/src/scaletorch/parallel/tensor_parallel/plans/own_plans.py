"""Read the tensor-parallel plan that a model brings along, of transformers or of `torch.nn`.

A plan of transformers names the modules to shard but not the head boundaries. As for any plan,
these come from the attention modules and their config.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from torch import nn

from ....dist.errors import InvalidArgumentError
from ..styles import Fused, PerHead, SharedTail, Slices, Stacked
from .attention import SHARED_KEYS, has_heads, latent_heads
from .plan import Match, Matches, Recognised, Style, children_of, look_up, with_outputs

PER_HEAD = "local_params"  # the style of a module whose single parameters have styles
SHARED_TAIL = "mla_kv_a_proj"

# Replicated modules of latent attention.
_WHOLE = ("indexer", "q_a_layernorm", "kv_a_layernorm")

EXPERTS = "moe_tp_experts"  # a module of stacked experts
SUMMED = "all_reduce"  # stacked shared experts
GATHERED = "gather"  # transformers 5.0: experts whose parameters have a style of `_LOCAL`
ROUTER = "ep_router"  # until 5.2 also in these plans; a router is replicated
APART = "grouped_gemm"  # 5.0: expert parallelism, not tensor parallelism
_LOCAL = ("local_colwise", "local_rowwise")  # these do not tell which dim is the width

# A parameter's style -> its shard dim of [experts, out, in], and the number of packed parts.
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
    "rowwise_rep": "row_split",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "replicate",
    "replicate": "replicate",
}
_OF_THE_HEAD = ("column_gather", "vocab", "replicate")  # a plan of only these shards no layer

# `model_type` -> plan of the base model, used instead of that of transformers.
_MISSING: Mapping[str, Mapping[str, Style]] = {
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
    """Return the plan of a model and of models inside it: name pattern -> style of transformers.

    Plans of `_MISSING` contain our own styles too.
    """
    plan: dict[str, Style] = {}
    for name, module in model.named_modules():
        own = [getattr(module, "_tp_plan", None)]
        if getattr(module, "base_model", None) is module:
            config = getattr(module, "config", None)
            missing = _MISSING.get(getattr(config, "model_type", ""))
            own.append(missing or getattr(config, "base_model_tp_plan", None))
        for each in own:
            for pattern, style in each.items() if isinstance(each, Mapping) else ():
                if style != ROUTER:
                    plan.setdefault(f"{name}.{pattern}".lstrip("."), style)
    return plan


def find_own_plan(model: nn.Module, divided: Collection[nn.Module] = ()) -> Recognised | None:
    """Match the model's own plan; return None if it has none that shards layers.

    A plan for only the head, or for expert parallelism (`APART`), does not count.

    Args:
        model: The whole model.
        divided: Modules that another strategy has divided over these ranks, such as experts; they
            are left out.

    Raises:
        InvalidArgumentError: The plan has an unknown style, or shards a single parameter.
    """
    plan = own_plan(model)
    if APART in plan.values():
        return None
    modules = dict(model.named_modules(remove_duplicate=False))
    modules = {name: module for name, module in modules.items() if module not in divided}
    matches = _match(plan, modules)
    if all(match.style in _OF_THE_HEAD for match in matches.values()):
        return None
    for module, name in _parameters(modules):
        pattern = _pattern(plan, name)
        own = module in matches and isinstance(matches[module].style, Stacked | PerHead)
        if pattern is not None and not own and plan[pattern] != "replicate":
            raise InvalidArgumentError(
                f"the plan of {type(model).__name__} gives the single parameter '{name}' the "
                f"style '{plan[pattern]}', but only modules are sharded; pass a plan of your own"
            )
    _leave_whole(modules, matches)
    heads = [*_attentions(modules, matches)]
    for name in (
        f"{each}.{own}" for each in heads if latent_heads(modules[each]) for own in _WHOLE
    ):
        if name in modules:  # replicated in latent attention
            matches.setdefault(modules[name], look_up(name, modules[name], name, "replicate"))
    _add_tied(modules, matches)
    for name in heads:  # dropout there acts on this rank's heads
        matches.setdefault(modules[name], look_up(name, modules[name], name, "sharded"))
    ordered = [matches[module] for module in model.modules() if module in matches]
    return Recognised(ordered, heads)


def _parameters(modules: Mapping[str, nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    for name, module in modules.items():
        for own, parameter in module._parameters.items():
            if parameter is not None:
                yield module, f"{name}.{own}".lstrip(".")


def _pattern(plan: Mapping[str, Style], name: str) -> str | None:
    """Return the pattern that matches a name; `*` in a pattern matches only a number."""
    generic = re.sub(r"\d+", "*", name)
    return next((pattern for pattern in (name, generic) if pattern in plan), None)


def _match(plan: Mapping[str, Style], modules: Mapping[str, nn.Module]) -> dict[nn.Module, Match]:
    matches: dict[nn.Module, Match] = {}
    for name, module in modules.items():
        pattern = _pattern(plan, name)
        style = None if pattern is None else _style(plan, pattern, name, modules)
        if pattern is None or style is None:
            continue
        match = look_up(name, module, pattern, style)
        whole = style in ("vocab", "column_gather")  # these return full outputs
        if whole and match.layer is not None and not match.layer.takes(module):
            match = look_up(name, module, pattern, "replicate")  # it does more than its style
        matches.setdefault(module, match)
    return matches


def _style(
    plan: Mapping[str, Style], pattern: str, name: str, modules: Mapping[str, nn.Module]
) -> Style | None:
    """Return our style for a module that the plan names; None if it has nothing to shard.

    Raises:
        InvalidArgumentError: The plan's style for it is unknown or unsupported.
    """
    theirs, module = plan[pattern], modules[name]
    if not isinstance(theirs, str):
        return theirs
    own = {n: _pattern(plan, f"{name}.{n}") for n in module._parameters}
    styles = {n: str(plan[found]) for n, found in own.items() if found is not None}
    if theirs == EXPERTS or (theirs in (SUMMED, GATHERED) and styles):
        return stacked_of(name, module, styles)
    if theirs == PER_HEAD:
        return per_head_of(name, module, styles)
    if theirs == SHARED_TAIL:
        return shared_tail_of(name, modules)
    if theirs not in TRANSFORMERS_STYLES:
        known = (*TRANSFORMERS_STYLES, EXPERTS, SUMMED, PER_HEAD, SHARED_TAIL)
        raise InvalidArgumentError(
            f"the model's own plan (_tp_plan) gives '{pattern}' the style {theirs!r}, which "
            f"is none of {', '.join(map(repr, known))}; pass a plan of your own"
        )
    style = TRANSFORMERS_STYLES[theirs]
    rows = style == "row" and isinstance(module, nn.Embedding)
    return "vocab" if rows else style  # the rows of an embedding are the vocabulary


def _attentions(modules: Mapping[str, nn.Module], matches: Matches) -> Iterator[str]:
    """Yield the names of attention modules with sharded projections."""
    for name, module in modules.items():
        mine = children_of(module, matches)
        columns, rows = any(m.is_column for m in mine), any(m.is_row for m in mine)
        called = f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
        named = "attn" in called or "attention" in called
        if columns and rows and (has_heads(module) or named):
            yield name


def _leave_whole(modules: Mapping[str, nn.Module], matches: dict[nn.Module, Match]) -> None:
    """Drop the matches inside attention with two or more row layers, which stays replicated.

    The output of the first row layer spans all heads, but the rest would work on this rank's.
    """
    for name in [*_attentions(modules, matches)]:
        children = modules[name].children()
        if sum(child in matches and matches[child].is_row for child in children) > 1:
            for inner in modules[name].modules():
                matches.pop(inner, None)


def _add_tied(modules: Mapping[str, nn.Module], matches: dict[nn.Module, Match]) -> None:
    """If the plan names only one of a tied embedding and head, add the other.

    If the class of the other cannot be sharded (such as an embedding with its own norm), both stay
    replicated.
    """
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
        for other in [m for m in matches if m._parameters.get("weight") is module.weight]:
            del matches[other]


def per_head_of(name: str, module: nn.Module, styles: Mapping[str, str]) -> PerHead | None:
    """Return the `PerHead` style of an attention module; None if it has no own parameters.

    Args:
        name: Name of the module.
        module: The module.
        styles: Parameter -> its style in the plan of transformers.

    Raises:
        InvalidArgumentError: The style of a parameter is missing or not "colwise".
    """
    own = [n for n, parameter in module._parameters.items() if parameter is not None]
    wrong = [n for n in own if styles.get(n) != "colwise"]
    if wrong:
        raise InvalidArgumentError(
            f"the model's own plan (_tp_plan) gives '{name}.{wrong[0]}' the style "
            f"{styles.get(wrong[0])!r}, which is not 'colwise'; pass a plan of your own"
        )
    return PerHead(*own) if own else None


def shared_tail_of(name: str, modules: Mapping[str, nn.Module]) -> SharedTail:
    """Return the style of a layer whose last features are the key that all heads share.

    Raises:
        InvalidArgumentError: The attention module around it does not give their number.
    """
    parent = name.rpartition(".")[0]
    features = vars(modules[parent]).get(SHARED_KEYS)
    if not isinstance(features, int):
        raise InvalidArgumentError(
            f"the model's own plan (_tp_plan) gives '{name}' the style {SHARED_TAIL!r}, but "
            f"'{parent}' has no {SHARED_KEYS}; pass a plan of your own"
        )
    return SharedTail(features)


def stacked_of(name: str, module: nn.Module, styles: Mapping[str, str]) -> Stacked:
    """Return the `Stacked` style for a module of experts in a plan of transformers.

    The module's `is_concatenated` tells whether gate and up in one weight are concatenated or
    interleaved. Biases, which plans do not name, are sharded like the output dim of their weight if
    that is sharded, and else added once.

    Args:
        name: Name of the module.
        module: The module.
        styles: Parameter -> its style in the plan.

    Raises:
        InvalidArgumentError: No parameter has a style, or one has a style that shards no stack.
    """
    sharded: dict[str, Slices | int] = {}
    added: list[str] = []
    for own, style in _packed(module, styles).items():
        if style not in _SLICES:
            raise InvalidArgumentError(
                f"the model's own plan (_tp_plan) gives '{name}.{own}' of the experts the style "
                f"{style!r}, which is none of {', '.join(map(repr, _SLICES))}; pass a plan of "
                "your own"
            )
        dim, parts = _SLICES[style]
        apart = parts == 1 or getattr(module, "is_concatenated", True)
        sharded[own] = Slices(dim, parts=parts) if apart else Slices(dim, unit=parts)
    out = 2 if getattr(module, "is_transposed", False) else 1
    for own in module._parameters:
        slices = sharded.get(own.removesuffix("_bias"))
        if own in sharded or not isinstance(slices, Slices):
            continue
        if slices.dim == out:
            sharded[own] = Slices(1, slices.parts, slices.unit)
        else:
            added.append(own)
    if not sharded:
        raise InvalidArgumentError(
            f"the model's own plan (_tp_plan) gives the experts '{name}' a style and none of "
            f"their parameters ({', '.join(module._parameters)}); pass a plan of your own"
        )
    return Stacked(sharded, tuple(added))


def _packed(module: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """Return the styles, with the packed style for a weight that holds both gate and up.

    Otherwise a rank would get gate features without the up features that belong to them.
    """
    found = dict(styles)
    gate_up, down = (module._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
    if gate_up is None or down is None or not gate_up.ndim == down.ndim == 3:
        return found
    rows, columns = (gate_up.shape[d] == 2 * down.shape[e] for d, e in ((1, 2), (2, 1)))
    if rows and {found.get(name) for name in ("gate_up_proj", "down_proj")} <= {*_LOCAL}:
        found |= {"gate_up_proj": "colwise", "down_proj": "rowwise"}
    if found.get("gate_up_proj") == ("colwise" if rows else "rowwise") and (rows or columns):
        found["gate_up_proj"] = f"packed_{found['gate_up_proj']}"
    return found


_KINDS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_OWN = ("forward", "_sa_block", "_mha_block", "_ff_block")
_STYLES: dict[str, Style] = {
    "self_attn": "attention",
    "multihead_attn": "attention",
    "linear1": "column",
    "linear2": "row",
}


def find_torch_layers(model: nn.Module, divided: Collection[nn.Module] = ()) -> Recognised | None:
    """Match the encoder and decoder layers of `torch.nn` in a model; return None without any.

    A subclass with its own forward does not count. Modules outside these layers stay replicated.

    Args:
        model: The whole model.
        divided: Modules that another strategy has divided over these ranks.
    """
    matches: dict[nn.Module, Match] = {}
    for name, layer in model.named_modules():
        if computes_as_torch(layer):
            for own, module, style in _parts(layer):
                if module not in divided:
                    place = f"{name}.{own}".strip(".")
                    matches.setdefault(module, look_up(place, module, place, style))
    if not matches:
        return None
    matches = with_outputs(matches)
    ordered = [matches[module] for module in model.modules() if module in matches]
    return Recognised(ordered, ())


def computes_as_torch(layer: nn.Module) -> bool:
    """Return whether a module is a `torch.nn` encoder or decoder layer with torch's forward."""
    kind = next((kind for kind in _KINDS if isinstance(layer, kind)), None)
    return kind is not None and all(
        getattr(type(layer), name, None) is getattr(kind, name, None) for name in _OWN
    )


def _parts(layer: nn.Module) -> Iterator[tuple[str, nn.Module, Style]]:
    """Yield the relative name, module and style of a layer and its sharded submodules."""
    yield "", layer, "sequence_layer"
    for name, style in _STYLES.items():
        if name in layer._modules:
            yield name, layer.get_submodule(name), style

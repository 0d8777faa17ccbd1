"""The tensor parallel plan that a user would write for a module, and possible mistakes in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scaletorch.parallel.tensor_parallel import Divide, Fused, PerHead

from .parts import Attention
from .recipe import Recipe

Plan = dict[str, Any]


def _attention(recipe: Recipe) -> Plan:
    if recipe["head_norm"] == "whole" or recipe["across"] == "group":
        return {}  # it normalizes over all heads, so it stays unsharded
    attention = Attention(recipe)
    kv, query = attention.kv_size, attention.q_size
    thirds = recipe["qkv"] in ("thirds", "packed") and kv == query
    fused = Fused("column", 3 if thirds else (query, kv, kv))
    projections: Mapping[str, Plan] = {
        "separate": {"q": "column", "k": "column", "v": "column"},
        "by_head": {"qkv": "column"},
        "kv_packed": {"q": "column", "kv": Fused("column", 2)},
    }
    plan = {**projections.get(recipe["qkv"], {"qkv": fused})}
    if recipe["gate"] != "none":
        plan["gate"] = "column"
    divided = {"attribute": ("num_heads", "num_kv_heads"), "both": ("num_heads", "num_kv_heads")}
    names = divided.get(recipe["heads"], ()) * (recipe["qkv"] != "by_head")
    if recipe["qkv"] in ("packed", "thirds") and not thirds:
        names = (*names, "q_size", "kv_size")
    per_head = ["temperature"] * (recipe["temperature"] == "per_head")
    per_head += ["sinks"] * (recipe["attend"] == "sinks")
    if per_head:
        plan[""] = PerHead(*per_head)
    elif names:
        plan[""] = Divide(*names)
    return {**plan, "o": "row"}


def _mlp(recipe: Recipe) -> Plan:
    form = recipe["mlp"]
    if form == "none":
        return {}
    entrances: Mapping[str, Plan] = {
        "gated": {"gate": "column", "up": "column"},
        "fused": {"gate_up": Fused("column", 2)},
        "glu": {"gate_up": Fused("column", 2)},
        "pairs": {"gate_up": "column"},
    }
    if form == "normed":  # it normalizes over all features
        return {"up": "column_gather", "down": "row_split"}
    plan = {**entrances.get(form, {"up": "column"})}
    if form == "gained":
        plan[""] = PerHead("gain")
    return {**plan, "down": "row"}


def right(recipe: Recipe) -> Plan:
    """Return a plan without mistakes; if a module has no right plan, that of its usual form."""
    plan: Plan = {} if recipe["embed"] == "one_hot" else {"embed": "vocab"}
    for place, part in (("attn", _attention(recipe)), ("mlp", _mlp(recipe))):
        plan |= {f"layers.*.{place}.{name}".rstrip("."): style for name, style in part.items()}
    return plan if recipe["head"] == "functional" else {**plan, "head": "column_gather"}


def _without(*names: str) -> Callable[[Plan], Plan]:
    ends = tuple(names)
    return lambda plan: {name: style for name, style in plan.items() if not name.endswith(ends)}


def _with(style: Any, *names: str) -> Callable[[Plan], Plan]:
    ends = tuple(names)
    return lambda plan: {n: style if n.endswith(ends) else own for n, own in plan.items()}


def _unfused(plan: Plan) -> Plan:
    return {n: "column" if isinstance(style, Fused) else style for n, style in plan.items()}


def _undivided(plan: Plan) -> Plan:
    return {n: style for n, style in plan.items() if not isinstance(style, Divide | PerHead)}


# Mistakes; some leave the plan unchanged or correct.
_MISTAKES: Mapping[str, Callable[[Plan], Plan]] = {
    "no_head": _without("head"),
    "head_column": _with("column", "head"),
    "no_embed": _without("embed"),
    "q_row": _with("row", ".q", ".qkv"),
    "k_whole": _without("attn.k", "attn.kv"),
    "up_row": _with("row", ".up", ".gate_up"),
    "down_column": _with("column", ".down"),
    "no_down": _without(".down"),
    "fused_column": _unfused,
    "no_divide": _undivided,
    "norms_whole": _without("norm"),
    "norms_replicate": _with("replicate", "norm"),
    "o_split": _with("row_split", "attn.o"),
    "gate_whole": _without(".gate"),
}


def plan_of(recipe: Recipe) -> Plan:
    """Return the plan of a recipe, with its mistake."""
    plan = right(recipe)
    return plan if recipe["plan"] == "right" else _MISTAKES[recipe["plan"]](plan)

"""All that can be wrong with a plan for a model, found before anything is changed or sent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import nn

from ...dist.errors import InvalidArgumentError
from .plan import (
    STYLES,
    Divide,
    Family,
    Match,
    Plan,
    find_family,
    find_mixins,
    match_plan,
    matching,
)
from .sharding import legal_sizes
from .sum_grad import SumGradients, cannot_sum
from .surround import cannot_surround

# What must divide by tp: where it is, and how long.
Length = tuple[str, int]


def resolve_plan(model: nn.Module, plan: Plan | None, tp_size: int) -> list[Match]:
    """Find the modules that a plan, or else the model's family, speaks for and check each.

    Args:
        model: The whole model; it is not changed.
        plan: Pattern of module names -> style; None looks for a known family.
        tp_size: Number of ranks it will be sharded over; none need exist.

    Raises:
        InvalidArgumentError: The plan does not match the model, a style does not fit its module,
            a size does not divide, a tied parameter would be sharded in two ways, or the model
            is not quite of its family.
    """
    if plan is None:
        family, matches = find_family(model)
        _check_complete(model, matches, family)
        heads = list(_head_counts(model, family))
        _check_head_size(model, matches, family)
    else:
        matches, heads = match_plan(model, plan), []
    lengths = [length for match in matches for length in _lengths(match)]
    _check_mixins(matches)
    _check_lengths(lengths + heads, tp_size)
    _check_ties(model, matches)
    return matches


def _lengths(match: Match) -> Iterator[Length]:
    """Check that the style fits and yield what it divides."""
    where = _place(match)
    if isinstance(match.style, Divide):
        yield from _divided(match, match.style, where)
        return
    style = STYLES[match.style]
    if not isinstance(style, tuple):
        return
    layer, _ = style
    reason = layer.misfit(match.module)
    if reason is not None:
        raise InvalidArgumentError(f"{where} cannot be sharded: {reason}")
    size: int = getattr(match.module, layer.sharded_size)
    yield f"{match.name}.{layer.sharded_size}".lstrip("."), size


def _place(match: Match) -> str:
    return f"module '{match.name}' (pattern '{match.pattern}', style {match.style!r})"


def _check_mixins(matches: Sequence[Match]) -> None:
    mixins = find_mixins(matches)
    for match in (m for m in matches if m.module in mixins):
        mixin = mixins[match.module]
        reason = cannot_sum(match.module) if mixin is SumGradients else None
        reason = reason or cannot_surround(match.module, mixin)
        if reason is not None:
            raise InvalidArgumentError(f"{_place(match)} cannot be given that style: {reason}")


def _divided(match: Match, style: Divide, where: str) -> list[Length]:
    """Check the attributes a `Divide` names and return those that are there."""
    own = vars(match.module)
    integers = [name for name, value in own.items() if type(value) is int]
    found = [name for name in style.attributes if name in own]
    missing = [name for name in style.attributes if name not in own]
    wrong = [name for name in found if name not in integers]
    if wrong or (missing and not style.optional):
        raise InvalidArgumentError(
            f"{where} cannot divide {', '.join(wrong or missing)}: the integer attributes that "
            f"the module itself has are {integers}"
        )
    return [(f"{match.name}.{name}".lstrip("."), own[name]) for name in found]


def _check_lengths(lengths: Sequence[Length], tp_size: int) -> None:
    wrong = [f"{where} = {length}" for where, length in lengths if length % tp_size]
    if wrong:
        shown = ", ".join(wrong[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")
        common = math.gcd(*(length for _, length in lengths))
        raise InvalidArgumentError(
            f"tp = {tp_size} does not divide {shown}; for this model and plan "
            f"{legal_sizes(common, tp_size)}"
        )


def _check_ties(model: nn.Module, matches: Sequence[Match]) -> None:
    """Refuse a parameter that two modules share and the plan shards in two ways."""
    styles = {m.module: STYLES[m.style] for m in matches if not isinstance(m.style, Divide)}
    seen: dict[nn.Parameter, tuple[str, int | None]] = {}
    for module_name, module in model.named_modules():
        style = styles.get(module)
        dims = style[0].shard_dims if isinstance(style, tuple) else {}
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full_name = f"{module_name}.{name}".lstrip(".")
            other, dim = seen.setdefault(parameter, (full_name, dims.get(name)))
            if dim != dims.get(name):
                raise InvalidArgumentError(
                    f"'{other}' and '{full_name}' are one tied parameter, but the plan "
                    f"{_sharding(dim)} the first and {_sharding(dims.get(name))} the second; "
                    "give both modules styles that agree"
                )


def _sharding(dim: int | None) -> str:
    return "replicates" if dim is None else f"shards along dim {dim}"


def _check_complete(model: nn.Module, matches: Sequence[Match], family: Family) -> None:
    """Refuse a model that has parameters where its family has none."""
    modules = dict(model.named_modules(remove_duplicate=False))
    planned = {m.module for m in matches if not isinstance(m.style, Divide)}
    for name in (n for pattern in family.complete for n in matching(pattern, modules)):
        for inner, module in modules[name].named_modules(prefix=name):
            if module not in planned and module._parameters:
                raise InvalidArgumentError(
                    f"the names are those of the {family.name} family, but '{inner}' has "
                    f"parameters {sorted(module._parameters)} that its plan does not know; "
                    "pass a plan of your own"
                )


def _head_counts(model: nn.Module, family: Family) -> Iterator[Length]:
    """Yield how many heads each projection has, so that none is cut in two."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for pattern, projections in family.heads.items():
        for name in matching(pattern, modules):
            found = {p: modules[f"{name}.{p}"] for p in projections if f"{name}.{p}" in modules}
            sizes = {p: int(getattr(found[p], "out_features", 0)) for p in found}
            head_dim = _head_dim(modules[name], next(iter(sizes.values()), 0))
            for projection, size in sizes.items():
                if head_dim < 1 or size % head_dim:
                    raise InvalidArgumentError(
                        f"'{name}' does not say how the {size} output features of its "
                        f"{projection} are divided into heads: expected a head_dim, or a number "
                        "of heads, on the module or its config; pass a plan of your own"
                    )
                yield f"heads of {name}.{projection}", size // head_dim


def _check_head_size(model: nn.Module, matches: Sequence[Match], family: Family) -> None:
    """Refuse a norm over all heads: its statistics would be of this rank's heads only."""
    modules = dict(model.named_modules(remove_duplicate=False))
    attentions = {
        n: p[0] for pattern, p in family.heads.items() for n in matching(pattern, modules)
    }
    for match in (m for m in matches if m.style == "replicate_sum_grad"):
        attention = match.name.rpartition(".")[0]
        if attention not in attentions:
            continue
        query = getattr(modules[f"{attention}.{attentions[attention]}"], "out_features", 0)
        head_dim = _head_dim(modules[attention], int(query))
        for name, parameter in match.module.named_parameters():
            if parameter.numel() != head_dim:
                raise InvalidArgumentError(
                    f"'{match.name}.{name}' has {parameter.numel()} elements, but a head has "
                    f"{head_dim}: a norm over several heads does not divide over ranks; only one "
                    "over each head can be tensor parallel"
                )


def _head_dim(attention: nn.Module, query_size: int) -> int:
    """Return the length of a head, 0 where nothing tells it."""
    for place in (attention, getattr(attention, "config", None)):
        head_dim = getattr(place, "head_dim", None)
        if isinstance(head_dim, int):
            return head_dim
        for name in ("num_heads", "num_attention_heads"):
            count = getattr(place, name, None)
            if isinstance(count, int) and count > 0:
                return query_size // count
    return 0

"""Telling, before any rank starts, what a plan does to a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from torch import nn

from ....dist.errors import InvalidArgumentError
from ..cuts.cut import share_cut
from ..cuts.fused import Fused
from ..layers.linear import ColumnParallelLinear, RowParallelLinear
from ..regions.region import Region
from ..regions.sum_grad import SumGradients
from ..regions.surround import cannot_surround
from .explanation import Communication, ExplainedParameter, Explanation
from .heads import is_column, is_row
from .plan import Match, Plan
from .validate import Resolved, resolve


def explain(model: nn.Module, tp: int, plan: Plan | None = None) -> Explanation:
    """Tell what `apply_tensor_parallel` would do; no process group is needed.

    Communication is that of training with every input's gradient wanted, without sequence
    parallelism. Column layers of one module (attention, an MLP) whose inputs are equally wide are
    taken to share one input, whose gradient is summed once.

    Args:
        model: The whole model; its parameters may be on the meta device. It is not changed.
        tp: Number of ranks.
        plan: As for `apply_tensor_parallel`.

    Raises:
        InvalidArgumentError: The plan does not fit the model, as in `apply_tensor_parallel`.
    """
    if type(tp) is not int or tp < 1:
        raise InvalidArgumentError(f"tp is a number of ranks, at least 1, got {tp!r}")
    resolved = resolve(model, plan, tp)
    matches = {match.module: match for match in resolved.matches}
    parameters = tuple(_parameters(model, matches, resolved, tp))
    communications = _communications(model, matches, resolved) if tp > 1 else ()
    return Explanation(tp, parameters, tuple(communications))


def _parameters(
    model: nn.Module, matches: Mapping[nn.Module, Match], resolved: Resolved, tp: int
) -> Iterator[ExplainedParameter]:
    for name, module in model.named_modules(remove_duplicate=False):
        match = matches.get(module)
        layer = None if match is None else match.layer
        for own, parameter in module._parameters.items():
            if parameter is None:
                continue
            shape, dim = tuple(parameter.shape), None
            locals_ = (shape,) * tp
            if layer is not None and own in layer.shard_dims and tp > 1:
                dim = layer.shard_dims[own]
                cut = resolved.cuts.get(module) or share_cut(shape[dim], tp)
                locals_ = tuple((*shape[:dim], size, *shape[dim + 1 :]) for size in cut.sizes)
            style = "" if match is None else _style(match)
            yield ExplainedParameter(f"{name}.{own}".lstrip("."), style, shape, dim, locals_)


def _communications(
    model: nn.Module, matches: Mapping[nn.Module, Match], resolved: Resolved
) -> Iterator[Communication]:
    entered: set[nn.Module] = set()
    for name, module in model.named_modules():
        yield from _entries(name, module, matches, entered)
        match = matches.get(module)
        if match is not None and module not in entered and _enters(match):
            yield _entry(name, [match])
        if match is not None:
            yield from _of_layer(name, match, resolved)


def _entries(
    name: str, parent: nn.Module, matches: Mapping[nn.Module, Match], entered: set[nn.Module]
) -> Iterator[Communication]:
    """Yield the sums of gradients of inputs that several children share."""
    sharing: dict[int, list[Match]] = {}
    for child in parent.children() if name and _is_region(parent, matches) else ():
        if child in matches and _enters(matches[child]):
            sharing.setdefault(_width(matches[child], "in"), []).append(matches[child])
    for shared in (found for found in sharing.values() if len(found) > 1):
        entered.update(match.module for match in shared)
        yield _entry(name, shared)


def _is_region(parent: nn.Module, matches: Mapping[nn.Module, Match]) -> bool:
    """Tell a module whose columns' input enters once; a container has no forward to enter."""
    if type(parent).forward is nn.Module.forward or cannot_surround(parent, Region) is not None:
        return False
    inside = [child for child in parent.children() if any(True for _ in child.parameters())]
    mine = [matches[child] for child in inside if child in matches]
    rows = [match for match in mine if match.layer and issubclass(match.layer, RowParallelLinear)]
    known = all(match.layer or match.mixin is SumGradients for match in mine)
    return len(rows) == 1 and known and len(mine) == len(inside)


def _entry(name: str, sharing: Sequence[Match]) -> Communication:
    names = ", ".join(match.name.rpartition(".")[2] for match in sharing)
    of = "input's gradient" + (f" ({names})" if len(sharing) > 1 else "")
    return Communication(name, "backward", "all_reduce", of, _width(sharing[0], "in"))


def _of_layer(name: str, match: Match, resolved: Resolved) -> Iterator[Communication]:
    """Yield what one module communicates, but for the sum of its input's gradient."""
    layer, sizes = (
        match.layer,
        [p.numel() for p in match.module._parameters.values() if p is not None],
    )
    if match.style == "replicate_sum_grad":
        yield Communication(
            name, "backward", "all_reduce", "parameters' gradients", fixed=sum(sizes)
        )
    if layer is None:
        return
    if issubclass(layer, ColumnParallelLinear):
        if not is_column(match):
            yield Communication(name, "forward", "all_gather", "output", _width(match, "out"))
        cut = resolved.cuts.get(match.module)
        if cut is not None and cut.replicated:
            yield Communication(
                name, "backward", "all_reduce", "replicas' gradients", fixed=sum(sizes)
            )
        return
    yield Communication(name, "forward", "all_reduce", "output", _width(match, "out"))
    if issubclass(layer, RowParallelLinear) and not is_row(match):
        yield Communication(name, "backward", "all_gather", "input's gradient", _width(match, "in"))


def _enters(match: Match) -> bool:
    return match.layer is not None and issubclass(match.layer, ColumnParallelLinear)


def _width(match: Match, side: Literal["in", "out"]) -> int:
    """Return the whole width of a layer's input or output."""
    names = {"in": ("in_features", "nx"), "out": ("out_features", "nf", "embedding_dim")}[side]
    found = (getattr(match.module, name, None) for name in names)
    return next(width for width in found if isinstance(width, int))


def _style(match: Match) -> str:
    if isinstance(match.style, Fused):
        return f"{match.style.style}, {len(match.lengths)} parts"
    return str(match.style)

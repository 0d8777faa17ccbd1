"""Show the shards that a plan gives each rank, or a plan to complete if there is none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ....dist.errors import InvalidArgumentError
from ...pg_manager.building import matching
from ..cuts.styles import Fused
from ..layers.linear import ColumnParallelLinear
from ..sharing.adapters import without_adapters
from .attention import out_features
from .plan import Match, Plan
from .resolve import Resolved, UnplannedError
from .suggest import resolve_or_suggest
from .trial import generic


@dataclass(frozen=True, slots=True)
class ExplainedParameter:
    """A parameter and its shard on each rank.

    Attributes:
        name: Name of the parameter. A tied one has an entry for each name.
        style: Style of its module; "" if the plan does not name the module.
        shape: Full shape.
        dim: Shard dim; None if it is replicated.
        local_shapes: Shape on each rank.
    """

    name: str
    style: str
    shape: tuple[int, ...]
    dim: int | None
    local_shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """The shards of a model. `dataclasses.asdict` gives plain data, `str` a table.

    Attributes:
        tp: Number of ranks.
        parameters: All parameters, in the model's order.
        skeleton: For a model without a plan, the source text of a dict to complete and pass as
            `plan`; `parameters` is empty then.
    """

    tp: int
    parameters: tuple[ExplainedParameter, ...]
    skeleton: str = ""

    def __str__(self) -> str:
        if self.skeleton:
            return self.skeleton
        rows = (
            (generic(p.name), p.style or "-", _sizes(p.shape), _local(p)) for p in self.parameters
        )
        return _table(("parameter", "style", "whole", f"on each of {self.tp} ranks"), rows)


def explain(
    model: nn.Module, tp: int, plan: Plan | None = None, *, sequence_parallel: bool = False
) -> Explanation:
    """Return the shards that `apply_tensor_parallel` would make; no process group is needed.

    For a model without a plan, `str` of the result is Python source: a dict to complete and pass
    as `plan`. Low-rank adapters are left out.

    Args:
        model: The whole model; its parameters may be on the meta device. It is not changed.
        tp: Number of ranks.
        plan: As for `apply_tensor_parallel`.
        sequence_parallel: As for `apply_tensor_parallel`.

    Raises:
        InvalidArgumentError: The plan does not fit the model, as in `apply_tensor_parallel`.

    Example:
        >>> print(explain(model, 4))
    """
    if type(tp) is not int or tp < 1:
        raise InvalidArgumentError(f"tp is a number of ranks, at least 1, got {tp!r}")
    with without_adapters(model):
        try:
            resolved = resolve_or_suggest(model, plan, tp, sequence_parallel=sequence_parallel)
        except UnplannedError:
            return Explanation(tp, (), _skeleton(model))
        return Explanation(tp, tuple(_parameters(model, resolved, tp)))


def _parameters(model: nn.Module, resolved: Resolved, tp: int) -> Iterator[ExplainedParameter]:
    for name, module in model.named_modules(remove_duplicate=False):
        match = resolved.matches.get(module)
        dims = {} if match is None else match.dims
        for own, parameter in module._parameters.items():
            if parameter is None:
                continue
            shape, dim = tuple(parameter.shape), None
            locals_ = (shape,) * tp
            cut = None if match is None else match.cut_of(own)
            if cut is not None and tp > 1:
                dim, sizes = dims[own], cut.sizes
                locals_ = tuple((*shape[:dim], size, *shape[dim + 1 :]) for size in sizes)
            style = "" if match is None else _style(match)
            yield ExplainedParameter(f"{name}.{own}".lstrip("."), style, shape, dim, locals_)


def _style(match: Match) -> str:
    if isinstance(match.style, Fused):
        return f"{match.style.style}, {len(match.lengths)} parts"
    return str(match.style)


def _sizes(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _local(parameter: ExplainedParameter) -> str:
    if parameter.dim is None:
        return "whole"
    return " or ".join(map(_sizes, dict.fromkeys(parameter.local_shapes)))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a text table; equal rows are merged into one with a count."""
    counted = Counter(map(tuple, rows))
    cells = [(*head, "times"), *((*row, str(times)) for row, times in counted.items())]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


_HEAD = """\
{name} has no plan. These are its linear layers, all whole on every rank as yet: give them "column"
if they make heads or inner features (queries, keys, values, gate, up), "row" if they take these
(output, down), "column_gather" for a head, and add "vocab" for an embedding of tokens. Then pass
this as plan="""


def _skeleton(model: nn.Module) -> str:
    """Return a plan for the linear layers of a model, as the source text of a dict.

    Layers of several blocks share one pattern if they have the same shape. torch's attention gets
    the style "attention", and its submodules none.
    """
    modules = dict(model.named_modules())
    inside = {m for a in modules.values() if _attends(a) for m in a.children()}
    layers = {n: _shape(m) for n, m in modules.items() if m not in inside and _shape(m)}
    lines = {}
    for name, shape in layers.items():
        style = "attention" if _attends(modules[name]) else "replicate"
        lines[_pattern(name, layers)] = f'"{style}",  # {shape}'
    head = "\n".join(f"# {line}" for line in _HEAD.format(name=type(model).__name__).splitlines())
    body = "\n".join(f'    "{pattern}": {line}' for pattern, line in lines.items())
    return f"{head}\n{{\n{body}\n}}"


def _pattern(name: str, layers: Mapping[str, Any]) -> str:
    """Return the name with `*` for numbers if all layers that match have the same shape."""
    pattern = re.sub(r"(?<![^.])\d+(?=\.)", "*", name)
    alike = all(layers[each] == layers[name] for each in matching(pattern, layers))
    return pattern if alike else name


def _attends(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention)


def _shape(layer: nn.Module) -> str:
    """Return the sizes of a layer as text; "" for a module that is not shardable."""
    if _attends(layer):
        return f"{vars(layer)['num_heads']} heads of {vars(layer)['head_dim']}"
    if not ColumnParallelLinear.takes(layer) and not hasattr(layer, "nx"):
        return ""
    return f"{getattr(layer, 'in_features', 0) or getattr(layer, 'nx', 0)} -> {out_features(layer)}"

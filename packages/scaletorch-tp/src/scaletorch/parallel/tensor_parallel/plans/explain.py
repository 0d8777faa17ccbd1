"""Show the shards that a plan gives each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from ....dist.errors import InvalidArgumentError
from ..sharing.adapters import without_adapters
from ..styles import Fused
from .plan import Plan
from .resolve import Resolved
from .suggest import resolve_or_suggest
from .trial import generic


@dataclass(frozen=True, slots=True)
class ExplainedParameter:
    """A parameter and its shard on each rank."""

    name: str  # a tied one has an entry for each name
    style: str  # of its module; "" if the plan does not name the module
    shape: tuple[int, ...]  # full
    dim: int | None  # the shard dim; None if it is replicated
    local_shapes: tuple[tuple[int, ...], ...]  # on each rank


@dataclass(frozen=True, slots=True)
class Explanation:
    """The shards of a model. `dataclasses.asdict` gives plain data, `str` a table."""

    tp: int  # number of ranks
    parameters: tuple[ExplainedParameter, ...]  # all, in the model's order

    def __str__(self) -> str:
        rows = (
            (
                generic(p.name), p.style or "-", _sizes(p.shape),
                "whole" if p.dim is None else _sizes(*p.local_shapes),
            )
            for p in self.parameters
        )  # fmt: skip
        return _table(("parameter", "style", "whole", f"on each of {self.tp} ranks"), rows)


def explain(
    model: nn.Module, tp: int, plan: Plan | None = None, *, sequence_parallel: bool = False
) -> Explanation:
    """Return the shards that `apply_tensor_parallel` would make; no process group is needed.

    Low-rank adapters are left out.

    Args:
        model: The whole model; its parameters may be on the meta device. It is not changed.
        tp: Number of ranks.
        plan: As for `apply_tensor_parallel`.
        sequence_parallel: As for `apply_tensor_parallel`.

    Raises:
        InvalidArgumentError: There is no plan, or it does not fit the model, as in
            `apply_tensor_parallel`.

    Example:
        >>> print(explain(model, 4))
    """
    if type(tp) is not int or tp < 1:
        raise InvalidArgumentError(f"tp is a number of ranks, at least 1, got {tp!r}")
    with without_adapters(model):
        resolved = resolve_or_suggest(model, plan, tp, sequence_parallel=sequence_parallel)
        return Explanation(tp, tuple(_parameters(model, resolved, tp)))


def _parameters(model: nn.Module, resolved: Resolved, tp: int) -> Iterator[ExplainedParameter]:
    for name, module in model.named_modules(remove_duplicate=False):
        match = resolved.matches.get(module)
        dims = {} if match is None else match.dims
        for own_name, parameter in module._parameters.items():
            if parameter is None:
                continue
            shape, dim = tuple(parameter.shape), None
            locals_ = (shape,) * tp
            cut = None if match is None else match.cut_of(own_name)
            if cut is not None and tp > 1:
                dim, sizes = dims[own_name], cut.sizes
                locals_ = tuple((*shape[:dim], size, *shape[dim + 1 :]) for size in sizes)
            style = "" if match is None else str(match.style)
            if match is not None and isinstance(match.style, Fused):
                style = f"{match.style.style}, {len(match.lengths)} projections"
            yield ExplainedParameter(f"{name}.{own_name}".lstrip("."), style, shape, dim, locals_)


def _sizes(*shapes: Sequence[int]) -> str:
    """Return the distinct shapes as text."""
    return " or ".join(" x ".join(map(str, shape)) or "scalar" for shape in dict.fromkeys(shapes))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a text table; equal rows are merged into one with a count."""
    counted = Counter(map(tuple, rows))
    cells = [(*head, "times"), *((*row, str(times)) for row, times in counted.items())]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )

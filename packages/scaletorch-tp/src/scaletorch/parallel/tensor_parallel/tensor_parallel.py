"""Shard a whole model in place, or explain its shards; layers can be imported from here too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

from ...dist import get_rank, get_world_size
from ...dist.errors import InvalidArgumentError
from ..pg_manager import axis_group
from ..pg_manager.building import divided_modules
from .layers.base import Memo, TensorParallelLayer, watch
from .layers.linear import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from .layers.multihead import leave_fast_paths
from .plans.plan import Plan
from .plans.resolve import Resolved
from .plans.suggest import resolve_or_suggest
from .plans.trial import generic
from .regions.region import Region
from .regions.surround import surround
from .sharing.adapters import check_adapters, shard_adapters, without_adapters
from .sharing.gradient_sums import infer_sums
from .sharing.sequence import share_sequences
from .styles import Fused

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "TensorParallelLayer",
    "VocabParallelEmbedding",
    "apply_tensor_parallel",
]

M = TypeVar("M", bound=nn.Module)


def apply_tensor_parallel(
    model: M,
    plan: Plan | None = None,
    group: ProcessGroup | None = None,
    *,
    sequence_parallel: bool = False,
) -> M:
    """Shard a model for this rank, in place and without communication.

    The modules named by the plan become tensor-parallel layers by a change of their class, as with
    FSDP2, so names, hooks and references to them stay valid, also those of the root. Their
    parameters are replaced: create the optimizer afterwards. Tied parameters stay tied. Low-rank
    adapters of peft are sharded like their layers, which the plan names as in the plain model.
    The autograd graph of a forward shows which gradients of replicated parameters are partial and
    need a sum over the ranks; the plan does not list them.

    Args:
        model: The whole model, the same on every rank.
        plan: Pattern of module names -> style. `*` matches any text inside one component of a
            name, a component `**` matches any number of components; "" is the root. Styles are
            "column", "column_gather", "column_embedding", "row", "row_split", "vocab", "attention",
            "replicate", "sharded", "sequence_layer", "sequence_whole", `Fused`, `Stacked`,
            `PerHead`, `SharedTail` and `Divide`. None takes the model's own plan (transformers),
            that of layers of `torch.nn`, or one suggested by a trial forward; it leaves out experts
            divided already.
        group: Ranks of the tensor-parallel axis; None means that axis of the current manager.
        sequence_parallel: Shard every sequence over the ranks between sharded layers.

    Returns:
        The model; with one rank it stays as it was.

    Raises:
        InvalidArgumentError: A pattern matches nothing, two patterns match one module, a style
            does not fit its module, a size leaves a rank without a shard, or an adapter cannot be
            sharded. Every rank raises the same error, and the model is unchanged.

    Example:
        >>> apply_tensor_parallel(model, {"**.fc1": "column", "**.fc2": "row"})
    """
    group = axis_group("tp", group)
    tp_size, divided = get_world_size(group), divided_modules(model, group)
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel}
    with without_adapters(model) as adapters:
        resolved = resolve_or_suggest(model, plan, tp_size, divided=divided, **options)
        layers = {match.module: match.layer for match in resolved.matches.values()}
        check_adapters(adapters, layers, sequence_parallel=sequence_parallel and tp_size > 1)
        if tp_size > 1:
            memo = _shard(resolved, group)
            _wrap(resolved, group, **options)
            infer_sums(resolved.view, group)
            shard_adapters(adapters, group, memo, **options)
    return model


def _shard(resolved: Resolved, group: ProcessGroup | None) -> Memo:
    """Convert layers to this rank's shards and set attributes; return the memo of shards."""
    memo: Memo = WeakTensorKeyDictionary()  # keeps no full parameter alive
    for match in resolved.matches.values():
        if match.layer is not None and match.cut is not None:
            match.layer.convert(match.module, group, memo, match.cut, **match.options)
    for module, values in resolved.attributes.items():
        vars(module).update({name: ranks[get_rank(group)] for name, ranks in values.items()})
    return memo


def _wrap(resolved: Resolved, group: ProcessGroup | None, *, sequence_parallel: bool) -> None:
    """Set up regions, random streams and sequence parallelism in modules around the shards."""
    view = resolved.view
    for match in resolved.matches.values():
        if match.mixin is not None:
            surround(match.module, match.mixin, group)
            vars(match.module).update({} if match.layer else match.options)
    watch(view.model)
    leave_fast_paths(view)
    for module in resolved.regions:
        # A model takes token ids, not a shard of hidden states.
        if module is not view.model or not sequence_parallel:
            surround(module, Region, group)
    if sequence_parallel:
        share_sequences(view, group, resolved.whole)


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
        rows = []
        for p in self.parameters:
            local = "whole" if p.dim is None else _sizes(*p.local_shapes)
            rows.append((generic(p.name), p.style or "-", _sizes(p.shape), local))
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

"""What sharded modules communicate in a forward and a backward, read off a matched plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from torch import nn

from ..layers.base import TensorParallelLayer
from ..layers.linear import ColumnParallelLinear, RowParallelLinear
from ..regions.region import Region
from ..regions.sequence import JoinSequence
from ..regions.sum_grad import SumGradients
from ..regions.surround import cannot_surround
from .explanation import Communication
from .heads import is_column, is_row
from .plan import Match
from .validate import Resolved
from .whole import find_whole


def communications(
    model: nn.Module, resolved: Resolved, sequence_parallel: bool
) -> Iterator[Communication]:
    """Yield the collectives of a step over more than one rank, in the model's order."""
    matches = {match.module: match for match in resolved.matches}
    shares = _on_shares(model, matches) if sequence_parallel else set()
    regions = [module for module in model.modules() if _is_region(module, matches)]
    whole = {module for module in find_whole(model, regions) if module in shares}
    shares -= {inner for module in whole for inner in module.modules()}
    entered: set[nn.Module] = set()
    for name, module in model.named_modules():
        match, on_shares = matches.get(module), module in shares
        if module in whole:
            width = _hidden_of(module, resolved)
            yield Communication(name, "forward", "all_gather", "input", width)
            yield Communication(name, "backward", "all_gather", "output's gradient", width)
        region = _is_region(module, matches) and not (sequence_parallel and module is model)
        for shared in _inputs(module, matches, on_shares) if region else ():
            entered.update(match.module for match in shared)
            yield from _beginning(name, shared, on_shares)
        if match is None or match.layer is None:
            yield from _of_whole(name, module, match, on_shares and not region)
        else:
            if _becomes(match, ColumnParallelLinear) and module not in entered:
                yield from _beginning(name, [match], on_shares)
            yield from _of_layer(name, match, resolved, on_shares)
        if match is not None and match.mixin is JoinSequence and on_shares:
            yield Communication(name, "forward", "all_gather", "output", _hidden(resolved))


def _on_shares(model: nn.Module, matches: Mapping[nn.Module, Match]) -> set[nn.Module]:
    """Return the modules that sequence parallelism changes: all up to the first that joins."""
    modules = list(model.modules())
    joins = [m for m in modules if m in matches and matches[m].mixin is JoinSequence]
    inside = {*joins[0].modules()} if joins else {*modules}
    last = max(index for index, module in enumerate(modules) if module in inside)
    return {*modules[: last + 1]}


def _hidden(resolved: Resolved) -> int:
    """Return the width of what flows between regions: what the last of them returns."""
    ends = (match for match in reversed(resolved.matches) if match.layer is not None)
    rows = (_width(match, "out") for match in ends if not _becomes(match, ColumnParallelLinear))
    return next(rows, 0)


def _hidden_of(module: nn.Module, resolved: Resolved) -> int:
    """Return the width of what a module that sees whole sequences takes in and returns."""
    own = (
        getattr(inner, "in_features", None) or getattr(inner, "nx", 0) for inner in module.modules()
    )
    return _hidden(resolved) or next(
        (width for width in own if isinstance(width, int) and width), 0
    )


def _is_region(parent: nn.Module, matches: Mapping[nn.Module, Match]) -> bool:
    """Tell what `find_regions` will find."""
    inside = [child for child in parent.children() if any(True for _ in child.parameters())]
    mine = [matches[child] for child in inside if child in matches]
    columns, rows = (
        sum(_becomes(match, layer) for match in mine)
        for layer in (ColumnParallelLinear, RowParallelLinear)
    )
    known = all(match.layer or match.mixin is SumGradients for match in mine)
    fits = columns > 0 and rows == 1 and known and len(mine) == len(inside)
    return fits and cannot_surround(parent, Region) is None


def _inputs(
    region: nn.Module, matches: Mapping[nn.Module, Match], sequence_parallel: bool
) -> list[list[Match]]:
    """Return the column layers that share an input; a container has no forward to enter."""
    if not _is_called(region):
        return []
    mine = [matches[child] for child in region.children() if child in matches]
    columns = [match for match in mine if _becomes(match, ColumnParallelLinear)]
    if sequence_parallel:  # the region gathers what it is called with, for all of them
        return [columns]
    sharing: dict[int, list[Match]] = {}
    for match in columns:
        sharing.setdefault(_width(match, "in"), []).append(match)
    return [shared for shared in sharing.values() if len(shared) > 1]


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _beginning(
    name: str, sharing: Sequence[Match], sequence_parallel: bool
) -> Iterator[Communication]:
    """Yield what happens where an input enters sharded layers."""
    names = ", ".join(match.name.rpartition(".")[2] for match in sharing)
    of, width = f" ({names})" if len(sharing) > 1 else "", _width(sharing[0], "in")
    if sequence_parallel:
        yield Communication(name, "forward", "all_gather", f"input{of}", width)
    back = _sum(sequence_parallel)
    yield Communication(name, "backward", back, f"input's gradient{of}", width)


def _sum(sequence_parallel: bool) -> Literal["all_reduce", "reduce_scatter"]:
    return "reduce_scatter" if sequence_parallel else "all_reduce"


def _of_layer(
    name: str, match: Match, resolved: Resolved, sequence_parallel: bool
) -> Iterator[Communication]:
    """Yield what one sharded layer communicates behind its beginning."""
    if _becomes(match, ColumnParallelLinear):
        yield from _of_column(name, match, resolved)
        return
    out = _width(match, "out")
    yield Communication(name, "forward", _sum(sequence_parallel), "output", out)
    if sequence_parallel:
        yield Communication(name, "backward", "all_gather", "output's gradient", out)
    if not _becomes(match, RowParallelLinear):
        return
    if not is_row(match):
        yield Communication(name, "backward", "all_gather", "input's gradient", _width(match, "in"))
    bias = match.module._parameters.get("bias")
    if sequence_parallel and bias is not None:
        of = "bias's gradient"
        yield Communication(name, "backward", "all_reduce", of, fixed=bias.numel())


def _of_column(name: str, match: Match, resolved: Resolved) -> Iterator[Communication]:
    if not is_column(match):
        yield Communication(name, "forward", "all_gather", "output", _width(match, "out"))
    cut = resolved.cuts.get(match.module)
    if cut is not None and cut.replicated:
        # Of packed parts only those are summed that several ranks have.
        summed = sum(part.whole for part in cut.packed if part.replicated)
        size = _size(match.module) // cut.whole * summed
        yield Communication(name, "backward", "all_reduce", "replicas' gradients", fixed=size)


def _of_whole(
    name: str, module: nn.Module, match: Match | None, on_shares: bool
) -> Iterator[Communication]:
    """Yield what a module communicates of which every rank has all.

    Args:
        name: Its name.
        module: The module.
        match: What the plan says of it.
        on_shares: It works on shares of sequences.
    """
    style = None if match is None else match.style
    summed = style == "replicate_sum_grad" or (on_shares and style != "replicate")
    if on_shares and isinstance(module, nn.Embedding):
        summed = style == "replicate_sum_grad"
        of = "output's gradient"
        yield Communication(name, "backward", "all_gather", of, module.embedding_dim)
    if summed and _is_called(module) and _size(module):
        of = "parameters' gradients"
        yield Communication(name, "backward", "all_reduce", of, fixed=_size(module))


def _becomes(match: Match, layer: type[TensorParallelLayer]) -> bool:
    return match.layer is not None and issubclass(match.layer, layer)


def _size(module: nn.Module) -> int:
    """Return the elements of a module's own parameters."""
    return sum(p.numel() for p in module._parameters.values() if p is not None)


def _width(match: Match, side: Literal["in", "out"]) -> int:
    """Return the whole width of a layer's input or output."""
    names = {"in": ("in_features", "nx"), "out": ("out_features", "nf", "embedding_dim")}[side]
    found = (getattr(match.module, name, None) for name in names)
    return next(width for width in found if isinstance(width, int))

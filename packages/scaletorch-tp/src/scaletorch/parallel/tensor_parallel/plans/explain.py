"""What a plan does to a model, before any rank starts: shards, and what each module sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from torch import nn

from ....dist.errors import InvalidArgumentError
from ..cuts.fused import Fused
from ..cuts.stacked import Stacked
from ..layers.linear import ColumnParallelLinear, RowParallelLinear
from ..layers.multihead import ParallelMultiheadAttention
from ..sharing.adapters import without_adapters
from ..sharing.joining import JoinSequence
from ..sharing.sequence import until_joined
from ..sharing.sequence_layers import SequenceLayer, inside_layers
from ..sharing.shared_tail import SharedTail
from .explanation import Communication, ExplainedParameter, Explanation
from .families import UnplannedError
from .plan import Match, Plan, children_of
from .resolve import Resolved, resolve
from .skeleton import skeleton


def explain(
    model: nn.Module, tp: int, plan: Plan | None = None, *, sequence_parallel: bool = False
) -> Explanation:
    """Return what `apply_tensor_parallel` would do; no process group is needed.

    Communication is that of training: one forward and backward that call each module once and
    want every gradient. Column layers of one module (attention, an MLP) whose inputs are equally
    wide are taken to share one input, whose gradient is summed once; with sequence parallelism it
    is gathered once. An embedding is taken to be looked up for each token of the batch.
    The router's weights that experts are called with, a few for each token, are not counted, nor
    are low-rank adapters. Of a model that has no plan, a plan to complete is explained: what `str`
    returns is Python, a dict to be passed as `plan`.

    Args:
        model: The whole model; its parameters may be on the meta device. It is not changed.
        tp: Number of ranks.
        plan: As for `apply_tensor_parallel`.
        sequence_parallel: As for `apply_tensor_parallel`.

    Raises:
        InvalidArgumentError: The plan does not fit the model, as in `apply_tensor_parallel`.

    Example:
        >>> print(explain(model, 4, sequence_parallel=True))
    """
    if type(tp) is not int or tp < 1:
        raise InvalidArgumentError(f"tp is a number of ranks, at least 1, got {tp!r}")
    with without_adapters(model):
        try:
            resolved = resolve(model, plan, tp, sequence_parallel=sequence_parallel)
        except UnplannedError:
            return Explanation(tp, (), (), skeleton(model))
        parameters = tuple(_parameters(model, resolved, tp))
        sent = tuple(_communications(model, resolved, sequence_parallel)) if tp > 1 else ()
    return Explanation(tp, parameters, sent)


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


def _communications(
    model: nn.Module, resolved: Resolved, sequence_parallel: bool
) -> Iterator[Communication]:
    """Yield the collectives of a step over more than one rank, in the model's order."""
    matches = resolved.matches
    joins = [m for m in model.modules() if m in matches and matches[m].mixin is JoinSequence]
    layers = [m for m in model.modules() if m in matches and matches[m].mixin is SequenceLayer]
    on = inside_layers(model, layers) if layers else until_joined(model, joins)
    shares = {*on} if sequence_parallel else set()
    whole = shares.intersection(resolved.whole)
    shares -= {inner for module in whole for inner in module.modules()}
    entered: set[nn.Module] = set()
    inside = {child for each in resolved.regions for child in each.children()}
    for name, module in model.named_modules():
        match, on_shares = matches.get(module), module in shares
        if module in whole:
            width = _hidden_of(module, resolved)
            yield Communication(name, "forward", "all_gather", "input", width)
            yield Communication(name, "backward", "all_gather", "output's gradient", width)
        region = module in resolved.regions and not (sequence_parallel and module is model)
        for shared in _inputs(module, resolved, on_shares) if region else ():
            entered.update(match.module for match in shared)
            yield from _beginning(name, shared, on_shares)
        if match is None or match.layer is None:
            partial = module in inside or (on_shares and not region)
            yield from _of_whole(name, module, match, on_shares and not region, partial=partial)
        elif match.computes:
            if match.enters and module not in entered:
                yield from _beginning(name, [match], on_shares)
            yield from _of_layer(name, match, on_shares)
        if on_shares and module in layers[:1]:
            of = "input's gradient"
            yield Communication(name, "backward", "all_gather", of, _hidden(resolved))
        if on_shares and module in (*joins, *layers[-1:]):
            yield Communication(name, "forward", "all_gather", "output", _hidden(resolved))


def _hidden(resolved: Resolved) -> int:
    """Return the width of what flows between regions: what the last of them returns."""
    ends = (match for match in reversed([*resolved.matches.values()]) if match.computes)
    rows = (_width(match, "out") for match in ends if not match.becomes(ColumnParallelLinear))
    return next(rows, 0)


def _hidden_of(module: nn.Module, resolved: Resolved) -> int:
    """Return the width of what a module that sees whole sequences takes in and returns."""
    own = (
        getattr(inner, "in_features", None) or getattr(inner, "nx", 0) for inner in module.modules()
    )
    return _hidden(resolved) or next(
        (width for width in own if isinstance(width, int) and width), 0
    )


def _inputs(region: nn.Module, resolved: Resolved, sequence_parallel: bool) -> list[list[Match]]:
    """Return the column layers that share an input; a container has no forward to enter."""
    if not _is_called(region):
        return []
    mine = children_of(region, resolved.matches)
    columns = [match for match in mine if match.enters]
    if sequence_parallel:  # the region gathers what it is called with, for all of them
        return [columns] if columns else []
    sharing: dict[int, list[Match]] = {}
    for match in columns:
        sharing.setdefault(_width(match, "in"), []).append(match)
    return [shared for shared in sharing.values() if len(shared) > 1]


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _beginning(
    name: str, sharing: Sequence[Match], sequence_parallel: bool
) -> Iterator[Communication]:
    """Yield the communication at the entry of an input into sharded layers."""
    names = ", ".join(match.name.rpartition(".")[2] for match in sharing)
    of, width = f" ({names})" if len(sharing) > 1 else "", _width(sharing[0], "in")
    if sequence_parallel:
        yield Communication(name, "forward", "all_gather", f"input{of}", width)
    back = _sum(sequence_parallel)
    yield Communication(name, "backward", back, f"input's gradient{of}", width)


def _sum(sequence_parallel: bool) -> Literal["all_reduce", "reduce_scatter"]:
    return "reduce_scatter" if sequence_parallel else "all_reduce"


def _of_layer(name: str, match: Match, sequence_parallel: bool) -> Iterator[Communication]:
    """Yield the communication of one sharded layer after its input has entered."""
    if match.becomes(ColumnParallelLinear):
        yield from _of_column(name, match)
        return
    if match.becomes(ParallelMultiheadAttention):  # its output is a row of its own
        yield from _beginning(name, [match], sequence_parallel)
        return
    if isinstance(match.style, Stacked):
        if match.style.enters:
            yield from _beginning(name, [match], sequence_parallel)
        if not match.style.leaves:
            return
    out = _width(match, "out")
    yield Communication(name, "forward", _sum(sequence_parallel), "output", out)
    if sequence_parallel:
        yield Communication(name, "backward", "all_gather", "output's gradient", out)
    if not match.becomes(RowParallelLinear):
        return
    if not match.is_row:
        yield Communication(name, "backward", "all_gather", "input's gradient", _width(match, "in"))
    bias = match.module._parameters.get("bias")
    if sequence_parallel and bias is not None:
        of = "bias's gradient"
        yield Communication(name, "backward", "all_reduce", of, fixed=bias.numel())


def _of_column(name: str, match: Match) -> Iterator[Communication]:
    if not match.is_column:
        yield Communication(name, "forward", "all_gather", "output", _width(match, "out"))
    cut = match.cut
    if cut is not None and cut.replicated:
        # Of packed parts only those are summed that several ranks have.
        summed = sum(part.whole for part in cut.packed if part.replicated)
        size = _size(match.module) // cut.whole * summed
        yield Communication(name, "backward", "all_reduce", "replicas' gradients", fixed=size)


def _of_whole(
    name: str, module: nn.Module, match: Match | None, on_shares: bool, *, partial: bool
) -> Iterator[Communication]:
    """Yield what a module communicates of which every rank has all.

    Args:
        name: Its name.
        module: The module.
        match: What the plan says of it.
        on_shares: It works on shares of sequences.
        partial: It works on these, or inside of a region, so that its gradients are summed.
    """
    style = None if match is None else match.style
    if isinstance(style, SharedTail):
        of = "shared features' gradient"
        yield Communication(name, "backward", "all_reduce", of, style.features)
    if on_shares and isinstance(module, nn.Embedding):
        partial = False
        of = "output's gradient"
        yield Communication(name, "backward", "all_gather", of, module.embedding_dim)
    if partial and _is_called(module) and _size(module):
        of = "parameters' gradients"
        yield Communication(name, "backward", "all_reduce", of, fixed=_size(module))


def _size(module: nn.Module) -> int:
    """Return the elements of a module's own parameters."""
    return sum(p.numel() for p in module._parameters.values() if p is not None)


def _width(match: Match, side: Literal["in", "out"]) -> int:
    """Return the whole width of a layer's input or output."""
    if isinstance(match.style, Stacked):
        return match.style.hidden(match.module)
    names = {
        "in": ("in_features", "nx", "embed_dim"),
        "out": ("out_features", "nf", "embedding_dim"),
    }[side]
    found = (getattr(match.module, name, None) for name in names)
    return next(width for width in found if isinstance(width, int))

"""Telling, before any rank starts, what a plan does to a model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ....dist.errors import InvalidArgumentError
from ..cuts.cut import share_cut
from ..cuts.fused import Fused
from .communications import communications
from .explanation import ExplainedParameter, Explanation
from .plan import Match, Plan
from .shares import check_shares
from .validate import Resolved, resolve


def explain(
    model: nn.Module, tp: int, plan: Plan | None = None, *, sequence_parallel: bool = False
) -> Explanation:
    """Tell what `apply_tensor_parallel` would do; no process group is needed.

    Communication is that of training: one forward and backward that call each module once and
    want every gradient. Column layers of one module (attention, an MLP) whose inputs are equally
    wide are taken to share one input, whose gradient is summed once; with sequence parallelism it
    is gathered once. An embedding is taken to be looked up for each token of the batch.

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
    resolved = resolve(model, plan, tp)
    if sequence_parallel:
        check_shares(model, resolved.matches)
    parameters = tuple(_parameters(model, resolved, tp))
    sent = tuple(communications(model, resolved, sequence_parallel)) if tp > 1 else ()
    return Explanation(tp, parameters, sent)


def _parameters(model: nn.Module, resolved: Resolved, tp: int) -> Iterator[ExplainedParameter]:
    matches = {match.module: match for match in resolved.matches}
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


def _style(match: Match) -> str:
    if isinstance(match.style, Fused):
        return f"{match.style.style}, {len(match.lengths)} parts"
    return str(match.style)

"""What can be wrong with a model for sequence parallelism, found before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ....dist.errors import InvalidArgumentError
from ..regions.sequence import until_joined
from ..regions.sum_grad import SumGradients
from ..regions.surround import cannot_surround
from .plan import Match


def check_shares(model: nn.Module, matches: Sequence[Match]) -> None:
    """Refuse a model that would compute something else on shares of its sequences.

    Raises:
        InvalidArgumentError: Sharded layers other than heads are registered after the module that
            joins the shares, or a module has parameters whose gradients cannot be summed.
    """
    joins = [match for match in matches if match.style == "sequence_join"]
    if joins:
        _check_joined(joins[0], matches[matches.index(joins[0]) + 1 :])
    told = {m.module for m in matches if m.layer is not None}
    told |= {m.module for m in matches if m.style in ("replicate", "replicate_sum_grad")}
    names = {module: name for name, module in model.named_modules()}
    for module in until_joined(model, [match.module for match in joins]):
        reason = _cannot_share(module) if module._parameters and module not in told else None
        if reason is not None:
            raise InvalidArgumentError(
                f"'{names[module]}' has parameters that every rank would use on its share of the "
                f"sequence, and their gradients cannot be summed: {reason}; give its parameters "
                "to the module that uses them, or do without sequence parallelism"
            )


def _check_joined(join: Match, after: Sequence[Match]) -> None:
    wrong = [m.name for m in after if m.layer is not None and not m.options.get("gather_output")]
    if wrong:
        raise InvalidArgumentError(
            f"'{join.name}' joins the sequences for heads ('column_gather') alone, but "
            f"{', '.join(wrong[:4])} are registered after it; register them before, or do without "
            "sequence parallelism"
        )


def _cannot_share(module: nn.Module) -> str | None:
    """Say why gradients would be missed: they are summed where a module's forward begins."""
    if isinstance(module, nn.ParameterList | nn.ParameterDict):
        return f"an nn.{type(module).__name__} is not called, but read by another module"
    if type(module).__name__ == "NonDynamicallyQuantizableLinear":
        return "nn.MultiheadAttention does not call it"
    return cannot_surround(module, SumGradients)

"""What is outside of layers that share sequences out, and may be called between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..layers.base import TensorParallelLayer
from ..regions.region import Region
from ..regions.sequence_shares import SequenceShares
from ..regions.surround import Surrounded, cannot_surround, own_class, surround
from ..regions.uncompiled import around_compiled
from .sum_grad import SumGradients


class SumBetween(SumGradients):
    """A module whose gradients are summed if it is called between layers, on shares."""

    _between: SequenceShares

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        if self._between.sharing:
            return super().forward(*args, **kwargs)
        return super(SumGradients, self).forward(*args, **kwargs)


class NotBetween(Surrounded):
    """A module that takes whole sequences: it is not to be called between layers."""

    _between: SequenceShares

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        if self._between.sharing:
            raise InvalidArgumentError(
                f"{describe_rank()}: {own_class(self).__name__} is outside of the layers that "
                "share sequences out (style 'sequence_layer'), and was called between them, where "
                "hidden states are this rank's share; do without sequence parallelism"
            )
        return super().forward(*args, **kwargs)


def guard_outside(model: nn.Module, layers: Sequence[nn.Module], shares: SequenceShares) -> None:
    """Let modules outside of layers sum gradients, or refuse, if they are called between them.

    Those that hold layers have both before and behind them; their own parameters are looked for
    in the graph of a first forward.
    """
    inside = {inner for layer in layers for inner in layer.modules()}
    for module in model.modules():
        if module in inside or inside.intersection(module.modules()):
            continue
        whole = isinstance(module, TensorParallelLayer | Region)
        kind: type[Surrounded] = NotBetween if whole else SumBetween
        if (whole or module._parameters) and cannot_surround(module, kind) is None:
            vars(surround(module, kind, shares.holder.group))["_between"] = shares

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
    """Let sharded modules outside of layers refuse to be called between them."""
    inside = {inner for layer in layers for inner in layer.modules()}
    for module in model.modules():
        if module in inside or inside.intersection(module.modules()):
            continue
        sharded = isinstance(module, TensorParallelLayer | Region)
        if sharded and cannot_surround(module, NotBetween) is None:
            vars(surround(module, NotBetween, shares.holder.group))["_between"] = shares

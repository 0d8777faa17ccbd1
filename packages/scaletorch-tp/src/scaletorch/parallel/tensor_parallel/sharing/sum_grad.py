"""Parameters that are whole on every rank but see a part of the activations only."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..layers.base import TensorParallelLayer
from ..regions.surround import Surrounded, cannot_surround
from ..regions.uncompiled import around_compiled, copy


class SumGradients(Surrounded):
    """A module whose own parameters' gradients are summed over the ranks, at each use.

    It is for what works on this rank's share, such as a norm of its heads: a rank computes a part
    of the gradient. Since every use is summed by itself, accumulation, ties and recomputation
    are as in one process.
    """

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on its parameters as they enter a parallel region."""
        own, group = self._parameters, self._tp_group.group
        entered = {name: p if p is None else copy(p, group) for name, p in own.items()}
        # Hooks and names stay on the parameters; only this call sees what they became.
        vars(self)["_parameters"] = entered
        try:
            return super().forward(*args, **kwargs)
        finally:
            vars(self)["_parameters"] = own


def cannot_sum(module: nn.Module) -> str | None:
    """Return why the gradients of `module` cannot be summed, or None if they can."""
    if isinstance(module, TensorParallelLayer):
        return f"it is a {type(module).__name__}, whose parameters are shards"
    inner = [name for child, m in module.named_children() for name, _ in m.named_parameters(child)]
    if inner:
        return f"only a module's own parameters are summed, but it contains {', '.join(inner[:4])}"
    return cannot_surround(module, SumGradients)

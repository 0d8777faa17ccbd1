"""Parameters that are whole on every rank but see a part of the activations only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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

    _entered: bool = False  # its parameters have entered with those of a module around it

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on its parameters as they enter a parallel region."""
        if self._entered:
            return super().forward(*args, **kwargs)
        with _summed(self):
            return super().forward(*args, **kwargs)


class SumInside(Surrounded):
    """A module inside of which modules sum their gradients, and others may read their parameters.

    So do routers that multiply by the weight of a layer which they do not call.
    """

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on all of these parameters as they enter."""
        with all_summed([m for m in self.modules() if isinstance(m, SumGradients)]):
            return super().forward(*args, **kwargs)


@contextmanager
def _summed(module: SumGradients) -> Iterator[None]:
    own, group = module._parameters, module._tp_group.group
    entered = {name: p if p is None else copy(p, group) for name, p in own.items()}
    # Hooks and names stay on the parameters; only this call sees what they became.
    vars(module).update(_parameters=entered, _entered=True)
    try:
        yield
    finally:
        vars(module).update(_parameters=own, _entered=False)


@contextmanager
def all_summed(modules: Sequence[SumGradients]) -> Iterator[None]:
    """Let the body see parameters that have entered already, whichever of its modules reads them.

    A module that is in such a body already stays as it is.
    """
    with ExitStack() as stack:
        for module in modules:
            if not module._entered:
                stack.enter_context(_summed(module))
        yield


def cannot_sum(module: nn.Module) -> str | None:
    """Return why the gradients of `module` cannot be summed, or None if they can."""
    if isinstance(module, TensorParallelLayer):
        return f"it is a {type(module).__name__}, whose parameters are shards"
    inner = [name for child, m in module.named_children() for name, _ in m.named_parameters(child)]
    if inner:
        return f"only a module's own parameters are summed, but it contains {', '.join(inner[:4])}"
    return cannot_surround(module, SumGradients)

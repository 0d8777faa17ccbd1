"""What every rank computes the same inside of a region, and what would be summed as often."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....dist import get_world_size
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..regions.surround import Surrounded, own_class
from ..regions.uncompiled import around_compiled


class ShareOfSum(Surrounded):
    """A module without parameters whose output is added to what the ranks sum.

    Experts that do nothing (zero experts) are some: each rank adds one tp-th of their output.
    """

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, and return this rank's share of the output."""
        out = super().forward(*args, **kwargs)
        if not isinstance(out, Tensor):
            raise InvalidArgumentError(
                f"{describe_rank()}: {own_class(self).__name__} must return a tensor of which "
                f"each rank adds its share, and returned a {type(out).__name__}"
            )
        return out / get_world_size(self._tp_group.group)


def cannot_share(module: Any) -> str | None:
    """Return why a module's output cannot be shared out, or None if it can."""
    inner = [name for name, _ in module.named_parameters()]
    return f"it has parameters, {', '.join(inner[:4])}" if inner else None

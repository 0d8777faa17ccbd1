"""The placeholder in `parameter.grad` for a gradient that lies in shards over the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....dist.errors import StateError
from ...pg_manager import describe_rank


class ShardedGradient(Tensor):
    """Shows that there is a gradient, and refuses computation: no rank has the whole.

    It takes no memory. `zero_()` sets the shard of this rank to zero.
    """

    _shard: Tensor | None

    def __new__(cls, parameter: Tensor, shard: Tensor | None) -> ShardedGradient:
        """Stand for the gradient of a parameter.

        Args:
            parameter: The parameter; its shape, dtype and device are those of the gradient.
            shard: The optimizer's tensor on this rank for the parameter, if it has one.
        """
        whole: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        whole._shard = shard
        return whole

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Describe it without values."""
        return f"ShardedGradient(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Zero the shard, and refuse all other operators."""
        if func in (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default):
            for each in args[0] if isinstance(args[0], list | tuple) else [args[0]]:
                zero(each)
            return args[0]
        raise StateError(
            f"{describe_rank()}: {func} of a gradient that lies in shards over the ranks: clip "
            "with clip_grad_norm_ of scaletorch, and see whole_gradients(model) for the whole"
        )


def zero(gradient: Tensor) -> None:
    """Set a gradient, or this rank's shard of it, to zero."""
    if not isinstance(gradient, ShardedGradient):
        gradient.zero_()
    elif gradient._shard is not None and gradient._shard.grad is not None:
        gradient._shard.grad.zero_()

"""The tensors that an optimizer updates on this rank: parameters, or ranges of them.

`ShardedGradient` stands in `parameter.grad` for a gradient that lies in shards over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....dist.errors import InvalidArgumentError, StateError
from ...pg_manager import describe_rank


@dataclass(frozen=True, slots=True)
class Shard:
    """A flat range of one parameter, and the optimizer's tensor for it.

    Attributes:
        name: The parameter's name in the model.
        parameter: The parameter itself.
        start: First element of the range in `parameter.flatten()`.
        stop: One past the last.
        tensor: The parameter itself, or a float32 (at least) tensor of `stop - start` elements:
            flat, or of the parameter's shape if it is whole. Its `grad` is the gradient.
        replicated: Whether every rank of the data-parallel group has the same range; otherwise its
            elements are on this rank only.
    """

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    tensor: Tensor
    replicated: bool

    @property
    def is_master(self) -> bool:
        """True if `tensor` is a master copy, of higher precision than the parameter."""
        return self.tensor.dtype != self.parameter.dtype


def whole_parameter(name: str, parameter: nn.Parameter) -> Shard:
    """Return the shard for a parameter that every rank updates as a whole."""
    return Shard(name, parameter, 0, parameter.numel(), parameter, replicated=True)


def parameter_shards(model: nn.Module) -> list[Shard]:
    """Return the shards that an optimizer of the model updates on this rank, by parameter.

    Args:
        model: A data-parallel wrapper, whose optimizer `shard_optimizer` may have sharded, or any
            module. Frozen parameters are left out; a shared one has its first name.
    """
    found: list[Shard] | None = getattr(model, "optimizer_shards", None)
    if found is not None:
        return list(found)
    return [
        whole_parameter(name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def settled_shards(model: nn.Module) -> list[Shard]:
    """Return the shards whose gradients count in the norm on this rank.

    Those are the `parameter_shards`, after all changes of gradients since backward were copied to
    them, and parameters that were frozen with a gradient, as for torch's function.

    Raises:
        InvalidArgumentError: `model` is not a module.
        StateError: A gradient in shards has not been synchronised.
    """
    check_module(model)
    settle = getattr(model, "settle_gradients", None)
    if settle is not None:
        settle()
    shards = parameter_shards(model)
    listed = {id(shard.parameter) for shard in shards}
    return shards + [
        whole_parameter(name, parameter)
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
        and id(parameter) not in listed
        and isinstance(parameter.grad, Tensor)
        and not isinstance(parameter.grad, ShardedGradient)
    ]


def is_sharded(model: nn.Module) -> bool:
    """Return whether ranks have shards of some parameter; the same on every rank of the group."""
    return getattr(model, "optimizer_shards", None) is not None


def check_module(model: object) -> None:
    """Refuse anything but a module."""
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"model must be a module, got {type(model).__name__}")


class ShardedGradient(Tensor):
    """A placeholder for a gradient that no rank has whole; it refuses computation.

    It takes no memory. `zero_()` sets the shard of this rank to zero.
    """

    _shard: Tensor | None

    def __new__(cls, parameter: Tensor, shard: Tensor | None) -> ShardedGradient:
        """Stand for a parameter's gradient; `shard` is this rank's optimizer tensor, or None."""
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
            for gradient in args[0] if isinstance(args[0], list | tuple) else [args[0]]:
                zero(gradient)
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

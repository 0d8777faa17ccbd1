"""Stand-ins for another stage's tensors, followed through the model's own code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank

# What these return depends on the form of what they are given, not on its values.
_OF_FORM_ALONE = {
    "empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
    "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
}  # fmt: skip
_READS = {"_local_scalar_dense", "equal"}  # a tensor's values become Python's


class _Forward(Protocol):
    """The forward that a stand-in belongs to.

    Attributes:
        follows: Whether the model's own code runs, and the stage's modules are still to come.
    """

    @property
    def follows(self) -> bool: ...


class StandIn(Tensor):
    """A tensor that stands for one of another stage, and all that is computed from it.

    The hidden states that a stage has received are those of one process on their way into the
    stage's first module alone; anywhere else one process has another tensor. So it is with the
    output of another stage's module here. It has its origin's values and memory. What is computed
    from it is a stand-in too, so a step without such code pays nothing.

    Attributes:
        forward: The forward that it belongs to.
        origin: The tensor that it was made of; None if it was computed.
    """

    forward: _Forward
    origin: Tensor | None = None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Make the call; results that come of stand-ins are such.

        Raises:
            InvalidArgumentError: It reads a number out of one, or writes it to another tensor.
        """
        kwargs = kwargs or {}
        forward = next(stand_ins_within((*args, *kwargs.values()))).forward
        name = func.overloadpacket.__name__
        follows = forward.follows and name not in _OF_FORM_ALONE
        if follows:
            _refuse(func, name, args, kwargs)
        with torch._C._DisableTorchDispatch():
            result = func(*args, **kwargs)
        return _marked(result, forward) if follows else result


def stand_in(value: Any, forward: _Forward) -> Any:
    """Return a value in which each tensor is a stand-in for itself."""
    if all(isinstance(tensor, StandIn) for tensor in tensors_in(value)):
        return value
    if type(value) is Tensor and value.layout == torch.strided:
        standing = _Standing.apply(value, forward)  # type: ignore[no-untyped-call]
        standing.origin = value
        return standing
    if type(value) is dict:
        return {name: stand_in(entry, forward) for name, entry in value.items()}
    if type(value) in (tuple, list):
        return type(value)(stand_in(entry, forward) for entry in value)
    return value


def plain(value: Any) -> Any:
    """Return a value in which each stand-in is again what it was made of, or computed as."""
    if isinstance(value, StandIn):
        return _Plain.apply(value) if value.origin is None else value.origin  # type: ignore[no-untyped-call]
    if type(value) is dict:
        return {name: plain(entry) for name, entry in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(plain, value))
    return value


def stand_ins_within(value: Any) -> Iterator[StandIn]:
    """Yield the stand-ins in a value: itself, or in tuples, lists and mappings, at any depth."""
    return (tensor for tensor in tensors_in(value) if isinstance(tensor, StandIn))


def stands(value: Any) -> bool:
    """Return whether a value is or contains a stand-in."""
    kind = type(value)
    if kind is Tensor or value is None:  # by far the most frequent cases
        return False
    if kind is tuple or kind is dict:
        return any(map(stands, value.values() if kind is dict else value))
    return next(stand_ins_within(value), None) is not None


class _Standing(torch.autograd.Function):
    """Make a stand-in; its gradient is its origin's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: _Forward) -> StandIn:
        standing: StandIn = _marked(tensor, forward)
        return standing

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Plain(torch.autograd.Function):
    """Make a plain tensor of what was computed from stand-ins."""

    @staticmethod
    def forward(ctx: Any, standing: StandIn) -> Tensor:
        with torch._C._DisableTorchDispatch():
            return standing.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _marked(result: Any, forward: _Forward) -> Any:
    if type(result) is Tensor:
        standing = Tensor._make_subclass(StandIn, result)
        standing.forward = forward
        return standing
    if type(result) in (tuple, list):
        return type(result)(_marked(entry, forward) for entry in result)
    return result


def _refuse(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse calls that bring values to a place at which they are not followed.

    Raises:
        InvalidArgumentError: The call is one of them.
    """
    written = tensors_in(_written(func, args, kwargs))
    if name in _READS:
        what = "reads a number out of"
    elif any(not isinstance(tensor, StandIn) for tensor in written):
        what = "writes to a tensor what it makes of"
    else:
        return
    raise InvalidArgumentError(
        f"{describe_rank()}: the model's forward {what} hidden states, or what another stage's "
        "modules return, outside its layers: on this stage these are other numbers than in one "
        "process; do it inside a layer, or make it an entry of the micro-batch"
    )


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that a call writes to."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    named = {a.name: value for a, value in zip(schema.arguments, args, strict=False)}
    return [value for name, value in {**named, **kwargs}.items() if name in written]

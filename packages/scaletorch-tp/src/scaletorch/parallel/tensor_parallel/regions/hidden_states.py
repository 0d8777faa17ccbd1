"""Find and convert the hidden states, a sequence shard, among the arguments of a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ...pg_manager.building import uncompiled
from .sequence_shares import SequenceShares
from .surround import own_class

_RESIDUAL = "residual"
_WAY_OUT = "do without sequence parallelism"


def argument_names(module: nn.Module, args: Sequence[Any]) -> list[str]:
    """Return the names of positional arguments in the module's own forward; "" for surplus ones."""
    names = [*inspect.signature(own_class(module).forward).parameters][1:]
    return [names[place] if place < len(names) else "" for place in range(len(args))]


@uncompiled
def convert_hidden(
    module: nn.Module,
    shares: SequenceShares,
    change: Callable[[Tensor], Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    widths: Collection[int] = (),
    join_residuals: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    """Convert the hidden states among the arguments of a module.

    An argument called "residual" is another shard of the same sequence, which the module adds to
    its output. Any other sequence is refused, since its shape does not tell whether it is full or
    a shard.

    Args:
        module: The module.
        shares: The sharding of sequences.
        change: Converts hidden states.
        args: The module's positional arguments.
        kwargs: Its keyword arguments.
        widths: Allowed last dims of hidden states; empty allows any.
        join_residuals: Convert residuals too.

    Returns:
        The positional and keyword arguments, and the number of tokens in the full sequence.

    Raises:
        InvalidArgumentError: There are no hidden states, or there is a second sequence.
    """
    names, kind = argument_names(module, args), own_class(module).__name__
    named = [*zip(names, args, strict=True), *kwargs.items()]
    given = [x for name, x in named if name != _RESIDUAL]
    hidden = next((x for x in given if _is_hidden(x, widths)), None)
    if hidden is None:
        raise InvalidArgumentError(_without(kind, widths, args, kwargs))
    rows = shares.in_rows(hidden, shares.own)
    length = (shares.length or 0) if rows else sum(shares.sizes(hidden))
    for other in tensors_in(given):
        if other is not hidden:
            _refuse_second(kind, other, hidden, widths or {hidden.shape[-1]}, length)
    whole = change(hidden)

    def converted(name: str, x: Any) -> Any:
        if name == _RESIDUAL and not join_residuals:
            return x
        if x is hidden:
            return whole
        return change(x) if name == _RESIDUAL and isinstance(x, Tensor) else x

    by_name = {name: converted(name, x) for name, x in kwargs.items()}
    return tuple(map(converted, names, args)), by_name, length


def _is_hidden(x: Any, widths: Collection[int]) -> bool:
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
        return False
    return not widths or x.shape[-1] in widths


def _without(
    kind: str, widths: Collection[int], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    shapes = ", ".join(str(tuple(x.shape)) for x in tensors_in((args, kwargs))) or "none"
    width = " or ".join(map(str, sorted({*widths}))) or "H"
    return (
        f"{describe_rank()}: with sequence parallelism {kind} must be called with its hidden "
        f"states, a floating tensor [..., tokens, {width}], and got tensors of shapes {shapes}; "
        f"{_WAY_OUT}"
    )


def _refuse_second(
    kind: str, other: Tensor, hidden: Tensor, widths: Collection[int], length: int
) -> None:
    """Refuse a tensor that may be a second sequence."""
    alike = other.is_floating_point() and other.ndim == hidden.ndim
    # A full table (such as positions) without a gradient is safe.
    harmless = alike and other.shape[-2] == length and not other.requires_grad
    if alike and other.shape[-1] in widths and not harmless:
        raise InvalidArgumentError(
            f"{describe_rank()}: {kind} was called with two sequences, of shapes "
            f"{tuple(hidden.shape)} and {tuple(other.shape)}; with sequence parallelism it cannot "
            "be known whether the second is this rank's share of its tokens or the whole, nor "
            f"whose sum its gradient is; {_WAY_OUT}"
        )

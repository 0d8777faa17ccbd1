"""Which tensor of a module's arguments is its hidden states, if these are shards of sequences.

The module is to see them whole. What else it is called with is either no sequence or cannot be
told from one: a second sequence may be whole, or a share, of this length or another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from .sequence_shares import SequenceShares
from .uncompiled import uncompiled

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_RESIDUAL = "residual"
_WAY_OUT = "do without sequence parallelism"


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a module is called with, and what it takes in.

    Attributes:
        name: What messages call the module.
        widths: Last dims that hidden states may have; none takes any.
        shares: How sequences are shared out.
        residuals: Places or names of arguments that are added to what the module makes of its
            hidden states: shares of the same sequence.
        join_residuals: The module wants them whole, too.
    """

    name: str
    widths: Collection[int]
    shares: SequenceShares
    residuals: Collection[int | str] = ()
    join_residuals: bool = False

    @uncompiled
    def changed(
        self, change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """Return the arguments with the hidden states among them changed.

        Raises:
            InvalidArgumentError: There are none, or a second sequence.
        """
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs.items())
        others = {key: x for key, x in given.items() if key not in self.residuals}
        hidden = next((x for x in others.values() if self._is_sequence(x)), None)
        if hidden is None:
            raise InvalidArgumentError(self._without(args, kwargs))
        rows, shares = self.shares.in_rows(hidden, self.shares.own), self.shares
        length = (shares.length or 0) if rows else sum(shares.sizes(hidden))
        for other in tensors_in([*others.values()]):
            if other is not hidden:
                self._check(other, hidden, length)
        whole = change(hidden)

        def replaced(key: int | str) -> Any:
            value = given[key]
            if key in self.residuals and isinstance(value, Tensor) and value is not hidden:
                return change(value) if self.join_residuals else value
            joins = value is hidden and (key not in self.residuals or self.join_residuals)
            return whole if joins else value

        return tuple(map(replaced, range(len(args)))), {name: replaced(name) for name in kwargs}

    def _is_sequence(self, x: Any) -> bool:
        return (
            isinstance(x, Tensor)
            and x.is_floating_point()
            and x.ndim > 1
            and (not self.widths or x.shape[-1] in self.widths)
        )

    def _without(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors_in((args, kwargs))) or "none"
        width = " or ".join(map(str, sorted({*self.widths}))) or "H"
        return (
            f"{describe_rank()}: with sequence parallelism {self.name} must be called with its "
            f"hidden states, a floating tensor [..., tokens, {width}], and got tensors of shapes "
            f"{shapes}; {_WAY_OUT}"
        )

    def _check(self, other: Tensor, hidden: Tensor, whole: int) -> None:
        """Refuse what a projection might take for a second sequence."""
        widths = self.widths or {hidden.shape[-1]}
        alike = other.is_floating_point() and other.ndim == hidden.ndim
        # A table (of positions) that no gradient reaches and that is whole harms nobody.
        harmless = alike and other.shape[-2] == whole and not other.requires_grad
        if alike and other.shape[-1] in widths and not harmless:
            raise InvalidArgumentError(
                f"{describe_rank()}: {self.name} was called with two sequences, of shapes "
                f"{tuple(hidden.shape)} and {tuple(other.shape)}; with sequence parallelism it "
                "cannot be known whether the second is this rank's share of its tokens or the "
                f"whole, nor whose sum its gradient is; {_WAY_OUT}"
            )


def residuals_of(forward: Callable[..., Any], args: Sequence[Any]) -> tuple[int | str, ...]:
    """Return where a module may be given a residual: by the name of its argument, or its place.

    Args:
        forward: The forward of the module's own class.
        args: What it is given by place.
    """
    names = list(inspect.signature(forward).parameters)[1 : len(args) + 1]
    return (_RESIDUAL, *(place for place, name in enumerate(names) if name == _RESIDUAL))

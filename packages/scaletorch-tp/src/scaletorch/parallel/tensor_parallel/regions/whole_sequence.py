"""Modules that mix tokens and are no region: between shares they work on whole sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from .overlap import DIM
from .random import common_random
from .region_inputs import Inputs
from .sequence_shares import SequenceShares
from .surround import Surrounded, own_class
from .uncompiled import around_compiled, gather, uncompiled


class WholeSequence(Surrounded):
    """An attention that the plan leaves whole, or shards in another way than as a region.

    It sees whole sequences, as every rank does alike, and keeps this rank's share of what it
    returns. So its parameters' gradients are whole, and its layers are as without shares.
    """

    _sequence: SequenceShares

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on whole sequences."""
        name, shares = own_class(self).__name__, self._sequence
        lengths: list[int] = []

        def whole(x: Tensor) -> Tensor:
            sizes = shares.sizes(x)
            lengths.append(sum(sizes))
            return gather(x, DIM, shares.holder.group, sizes=sizes)

        args, kwargs = Inputs(name, (), shares).changed(whole, args, kwargs)
        with common_random():  # every rank draws alike
            out = super().forward(*args, **kwargs)
        own, found = _shared(out, lengths[0], shares)
        if not found:
            raise InvalidArgumentError(
                f"{describe_rank()}: with sequence parallelism {name} must return hidden states "
                f"[..., {lengths[0]}, H], or a tuple that holds them, and returned "
                f"{type(out).__name__}; do without sequence parallelism"
            )
        return own


@uncompiled
def _shared(out: Any, length: int, shares: SequenceShares) -> tuple[Any, bool]:
    """Return what a module returned with this rank's share of hidden states in it, if any."""
    if isinstance(out, Tensor):
        is_hidden = out.is_floating_point() and 1 < out.ndim < 4 and out.shape[DIM] == length
        return (shares.split(out), True) if is_hidden else (out, False)
    if type(out) not in (tuple, list):
        return out, False
    pairs = [_shared(each, length, shares) for each in out]
    return type(out)(each for each, _ in pairs), any(found for _, found in pairs)

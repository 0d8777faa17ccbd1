"""Positions that a model counts of its hidden states, where these are shares of sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..regions.sequence_shares import SequenceShares
from ..regions.surround import Surrounded, own_class
from ..regions.uncompiled import around_compiled, uncompiled


class WholePositions(Surrounded):
    """An embedding of positions, which counts those of a share on to the end of the sequence.

    Every rank's model counts its own tokens from 0 on. The embedding gets the positions of all,
    and its output is shared out as that of the words is.
    """

    _sequence: SequenceShares | None = None  # without sequence parallelism all are counted already

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on whole positions."""
        if self._sequence is not None and self._sequence.length is not None:
            name, shares = own_class(self).__name__, self._sequence
            args = tuple(_whole(each, name, shares) for each in args)
            kwargs = {key: _whole(each, name, shares) for key, each in kwargs.items()}
        return super().forward(*args, **kwargs)


@uncompiled
def _whole(x: Any, name: str, shares: SequenceShares) -> Any:
    """Return the positions of all tokens if `x` is those of a share; anything else as it is."""
    own, length = shares.own or 0, shares.length or 0
    if not isinstance(x, Tensor) or x.is_floating_point() or not x.ndim or x.shape[-1] != own:
        return x
    if not bool((x == x[..., :1] + torch.arange(own, device=x.device)).all()):
        raise InvalidArgumentError(
            f"{describe_rank()}: {name} was called with {own} of {length} tokens' positions, which "
            "do not follow one another; do without sequence parallelism"
        )
    return x[..., :1] + torch.arange(length, device=x.device)

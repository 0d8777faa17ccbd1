"""Where sequences that were shared out are whole again."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..regions.sequence_shares import SequenceShares
from ..regions.surround import Surrounded
from ..regions.uncompiled import around_compiled, uncompiled


class JoinSequence(Surrounded):
    """A module after which sequences are whole, as the model's own code there takes them to be."""

    _sequence: SequenceShares | None = None  # without sequence parallelism they are whole already

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, and join the ranks' shares."""
        out = super().forward(*args, **kwargs)
        return out if self._sequence is None else joined(out, self._sequence)


@uncompiled
def joined(out: Any, shares: SequenceShares) -> Any:
    """Return what a module returned, with its hidden states joined: the first tensor in it."""
    if isinstance(out, Tensor):
        return shares.join(out)
    if isinstance(out, dict):  # an output of transformers
        name = next(name for name, value in out.items() if isinstance(value, Tensor))
        out[name] = shares.join(out[name])
        return out
    return type(out)((shares.join(out[0]), *out[1:]))

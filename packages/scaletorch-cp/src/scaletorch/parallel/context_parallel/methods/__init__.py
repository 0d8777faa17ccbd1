"""Methods of attention over sharded sequences, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from . import all_gather, ring, ulysses
from .call import Call, Saved, WithSinks


class Method(Protocol):
    """A method of attention: a module of two functions."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Saved]:
        """Return this rank's output [B, H, L, D] in q's dtype, and the tensors for backward."""

    def backward(self, grad_out: Tensor, saved: Saved, call: Call) -> WithSinks:
        """Return this rank's dq, dk, dv and its partial sum of dsinks, in float32 at least."""


METHODS: Mapping[str, Method] = {
    "ring": ring,
    "all_gather": all_gather,
    "ulysses": ulysses,  # heads divided over all ranks
    "hybrid": ulysses,  # heads divided over subgroups of ranks, and a ring across them
}

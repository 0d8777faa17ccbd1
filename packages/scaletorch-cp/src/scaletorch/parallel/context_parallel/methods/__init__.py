"""Ways to attend over a sequence that is divided over ranks, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from . import gathered, ring, ulysses
from .call import Call, Saved, WithSinks


class Method(Protocol):
    """A way to attend: a module of two functions."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Saved]:
        """Return this rank's output [B, H, L, D] in q's dtype, and what backward needs."""

    def backward(self, grad_out: Tensor, saved: Saved, call: Call) -> WithSinks:
        """Return dq, dk, dv of this rank's shares and its part of sinks', in float32 at least."""


METHODS: Mapping[str, Method] = {
    "ring": ring,
    "all_gather": gathered,
    "ulysses": ulysses,  # heads divided over all ranks
    "hybrid": ulysses,  # over parts of them, and a ring across
}

"""Entering a parallel region once where several layers take the same input.

Query, key and value projections share one input, and so do the gate and the up projection: its
gradient is summed over the ranks once, after the layers' shares have been added.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...dist.functional import copy
from .surround import Surrounded


class _Entry(NamedTuple):
    """An input, held so that its id stays its own, and what it became in the region."""

    x: Tensor
    entered: Tensor


# Inputs of the module whose forward is running; None outside of any `SharedInputs`.
_entries: ContextVar[dict[tuple[Any, ...], _Entry] | None] = ContextVar("_entries", default=None)


def enter(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return `x` for this rank's shards; in backward its gradient is summed over the ranks."""
    entries = _entries.get()
    if entries is None:
        return copy(x, group)
    key = id(x), x._version, group, torch.is_grad_enabled()
    if key not in entries:
        entries[key] = _Entry(x, copy(x, group))
    return entries[key].entered


class SharedInputs(Surrounded):
    """A module that holds several column-parallel layers: they enter with one input once."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        token = _entries.set({})
        try:
            return super().forward(*args, **kwargs)
        finally:
            _entries.reset(token)

"""Parallel regions: modules whose sharded layers take one input, which enters once.

Query, key and value projections share one input, and so do the gate and the up projection: its
gradient is summed over the ranks once, after the layers' shares have been added.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....dist.functional import copy
from .surround import Surrounded
from .uncompiled import around_compiled, uncompiled

if TYPE_CHECKING:
    from .sequence import SequenceShares


class _Entry(NamedTuple):
    """An input, held so that its id stays its own, and what it became in the region."""

    x: Tensor
    entered: Tensor


# Inputs of the module whose forward is running; None outside of any `Region`.
_entries: ContextVar[dict[tuple[Any, ...], _Entry] | None] = ContextVar("_entries", default=None)


@uncompiled
def enter(x: Tensor, group: ProcessGroup | None, sequence: SequenceShares | None = None) -> Tensor:
    """Return the whole `x` for this rank's shards; in backward its gradient is summed.

    Args:
        x: What every rank has; or a share of a sequence, or what a `Region` made of it.
        group: Ranks of the tensor-parallel axis.
        sequence: How sequences are shared out; None where every rank has `x`.
    """
    entries = _entries.get()
    if sequence is not None:  # a region gathers at its beginning, and sums there in backward
        return sequence.enter(x) if entries is None else x
    if entries is None:
        return copy(x, group)
    key = id(x), x._version, group, torch.is_grad_enabled()
    if key not in entries:
        entries[key] = _Entry(x, copy(x, group))
    return entries[key].entered


class Region(Surrounded):
    """A module that holds column-parallel layers: what they take enters once.

    With sequence parallelism its first tensor is this rank's share of the hidden states, and is
    gathered before the module sees it: modules take sizes from their input.
    """

    _sequence: SequenceShares | None = None

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        if self._sequence is not None:
            args, kwargs = _with_first_tensor(self._sequence.enter, args, kwargs)
        token = _entries.set({})
        try:
            return super().forward(*args, **kwargs)
        finally:
            _entries.reset(token)


def _with_first_tensor(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with the first tensor among them changed."""
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            return (*args[:index], change(value), *args[index + 1 :]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            return args, {**kwargs, name: change(value)}
    return args, kwargs

"""Memory for flat tensors that a group's ranks reduce and gather again and again."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..world.info import info_of
from .joining import node_memory

LEAST = 2**16  # elements for which memory is quicker than messages


class FlatBuffers:
    """Flat tensors of a group, in memory that all its ranks map if they can.

    They can on one Linux host, as one user, if the group has gloo for CPU tensors; with
    `SCALETORCH_SHARED_MEMORY=0` on any rank they do not. Asynchronous flat calls that are told of
    the buffers then add up in that memory what is large, and send nothing.

    Args:
        group: The ranks, which all make their buffers at once; None makes ordinary tensors.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group
        self._memory = node_memory(group)
        self._least = LEAST

    @property
    def shared(self) -> bool:
        """Whether whoever computes adds up, in memory; else messages travel beside."""
        return self._memory is not None

    @property
    def staged(self) -> bool:
        """Whether a call is several, inside nodes and across them (`use_hierarchy`)."""
        return self._group is not None and info_of(self._group).levels is not None

    def slot(self) -> int | None:
        """Return a number for tensors of which each takes the place of the one before."""
        return None if self._memory is None else self._memory.slot()

    def empty(
        self, elements: int, dtype: torch.dtype, device: torch.device, slot: int | None = None
    ) -> Tensor:
        """Return a flat tensor of arbitrary values.

        Args:
            elements: How many; as many on every rank.
            dtype: Any.
            device: Where.
            slot: As `slot` returns it, if such a tensor is made again and again.
        """
        if self._memory is None or device.type != "cpu" or elements < self._least:
            return torch.empty(elements, dtype=dtype, device=device)
        return self._memory.empty(elements, dtype, slot)

    def forget(self) -> None:
        """Drop what is kept of others' tensors; nothing may be under way."""
        if self._memory is not None:
            self._memory.forget()

"""Gradients that are not finite: found where they are made, and named on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from torch import Tensor
from torch.distributed import ProcessGroup

from ...dist import all_gather_object, group_ranks
from ...dist.errors import NonFiniteError
from ..pg_manager import describe_rank
from .slot import Slot

SHOWN = 3  # parameters named for each rank


def first_nonfinite(slots: Sequence[Slot], parts: Iterable[tuple[Slot, Tensor]]) -> Iterator[Slot]:
    """Yield the slots whose parts of a buffer have an element that is not finite."""
    for slot, part in parts:
        # A sum costs one pass; it may overflow of itself, so a suspect is looked at again.
        if not part.sum().isfinite() and not part.isfinite().all():
            yield slot


def raise_nonfinite(names: Sequence[str], group: ProcessGroup | None) -> NoReturn:
    """Raise on every rank of the group, naming whose gradients of what are not finite.

    Args:
        names: This rank's own; some rank has some.
        group: The ranks.
    """
    found = all_gather_object(list(names), group=group)
    parts = []
    for rank, theirs in zip(group_ranks(group), found, strict=True):
        if theirs:
            more = f" and {len(theirs) - SHOWN} more" if len(theirs) > SHOWN else ""
            parts.append(f"rank {rank}: {', '.join(theirs[:SHOWN])}{more}")
    raise NonFiniteError(
        f"{describe_rank()}: gradients that are not finite ({'; '.join(parts)}); none was summed, "
        "and all are None now: look at that rank's batch, lower the learning rate, or scale the "
        "loss of float16 less"
    )

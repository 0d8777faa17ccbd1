"""Which gradients share a bucket."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .bucket import Bucket
from .slot import Slot

FIRST_SIZE = 2**18  # most elements in the first bucket: its reduction begins early in backward


def fill_buckets(
    slots: Iterable[Slot], bucket_size: int, grad_type: torch.dtype | None, multiple: int = 1
) -> list[Bucket]:
    """Part slots, in the order given, into buckets of at most ``bucket_size`` elements.

    A bucket has one dtype and one device, and at least one parameter, however large. The first
    is small, so that its reduction begins early. Buckets come in the order in which their last
    parameters do.
    """
    members: list[tuple[torch.dtype, list[Slot]]] = []
    current: dict[Any, list[Slot]] = {}
    room: dict[Any, int] = {}
    place: dict[int, int] = {}
    for slot in slots:
        place[slot.index] = len(place)
        dtype = _buffer_dtype(slot, grad_type)
        key = (dtype, slot.parameter.dtype, slot.parameter.device)
        elements = slot.parameter.numel()
        if elements > room.get(key, -1):
            current[key], room[key] = (
                [],
                min(bucket_size, FIRST_SIZE if not members else bucket_size),
            )
            members.append((dtype, current[key]))
        current[key].append(slot)
        room[key] -= elements
    members.sort(key=lambda entry: place[entry[1][-1].index])
    return [Bucket(each, dtype, multiple) for dtype, each in members]


def _buffer_dtype(slot: Slot, grad_type: torch.dtype | None) -> torch.dtype:
    """Return the dtype a gradient is kept in; ``grad_type`` is for real floating ones."""
    dtype = slot.parameter.dtype
    return dtype if grad_type is None or not dtype.is_floating_point else grad_type

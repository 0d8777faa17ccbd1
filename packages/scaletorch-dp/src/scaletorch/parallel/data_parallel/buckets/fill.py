"""Which gradients share a bucket."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .bucket import Bucket
from .reduction import Reduction
from .slot import Slot

SMALL = 2**18  # elements of a bucket that costs little more to start than to send


def fill_buckets(
    slots: Iterable[Slot], bucket_size: int, grad_type: torch.dtype | None, reduction: Reduction
) -> list[Bucket]:
    """Part slots, in the order given, into buckets of at most `bucket_size` elements.

    A bucket has one dtype and one device, and at least one parameter, however large. There are
    as many or so as the reduction is quick with, if they do not get smaller than `SMALL`, and the
    first is that small, so that its reduction begins early. Buckets come in the order in which
    their last parameters do.
    """
    slots = list(slots)
    share = sum(slot.parameter.numel() for slot in slots) // reduction.least_buckets
    usual = min(bucket_size, max(share, SMALL))
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
            current[key], room[key] = [], usual if members else min(usual, SMALL)
            members.append((dtype, current[key]))
        current[key].append(slot)
        room[key] -= elements
    members.sort(key=lambda entry: place[entry[1][-1].index])
    return [Bucket(each, dtype, reduction.multiple(dtype)) for dtype, each in members]


def one_each(slots: Iterable[Slot], reduction: Reduction) -> list[Bucket]:
    """Give every parameter a bucket of its own, in registration order."""
    ordered = sorted(slots, key=lambda slot: slot.index)
    dtypes = [slot.parameter.dtype for slot in ordered]
    return [
        Bucket([slot], dtype, reduction.multiple(dtype))
        for slot, dtype in zip(ordered, dtypes, strict=True)
    ]


def _buffer_dtype(slot: Slot, grad_type: torch.dtype | None) -> torch.dtype:
    """Return the dtype a gradient is kept in; `grad_type` is for real floating ones."""
    dtype = slot.parameter.dtype
    return dtype if grad_type is None or not dtype.is_floating_point else grad_type

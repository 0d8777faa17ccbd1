"""The cost of a layout: memory of its pipeline ranks, seconds of its step; numbers with units."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass

from ..dist.errors import InvalidArgumentError
from .description import Layout

_BINARY = {"TiB": 2.0**40, "GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0}
_SIZES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, **_BINARY}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the fullest rank at one place of the pipeline."""

    parameters: int  # the rank's parameter shards
    gradients: int  # buffers in which gradients are accumulated
    optimizer: int  # the optimizer's state, and its master weights if it has any
    activations: int  # kept for backward at the peak, also between the halves of a split backward
    working: int = 0  # temporary above that while a block runs, the larger of both passes
    buffers: int = 0  # communication buffers: gradient buckets and messages

    @property
    def total(self) -> int:
        """The sum of all fields."""
        return sum(astuple(self))


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of a step, on the slowest rank of the pipeline."""

    step: float  # all of it
    computing: float  # forward, backward and recomputation
    exposed: dict[str, float]  # communication that computation waits for, by axis
    hidden: dict[str, float]  # communication that overlaps with computation, by axis
    bubble: float  # share of the step in which pipeline ranks wait for one another
    update: float  # of the optimizer
    low: float  # optimistic estimate of `step`
    high: float  # pessimistic estimate of `step`


@dataclass(frozen=True, slots=True)
class Estimate:
    """A layout and its costs."""

    layout: Layout
    memory: tuple[Memory, ...]  # memory of each rank of the pipeline
    time: Time  # of a step
    communicators: int = 0  # bytes of communicators on each rank, not included in `memory`

    @property
    def fullest(self) -> int:
        """The pipeline rank that holds the most."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total)

    @property
    def peak(self) -> int:
        """Bytes on the fullest rank, including its communicators."""
        return self.memory[self.fullest].total + self.communicators


def bytes_in(given: str) -> int:
    """Return the bytes of a size such as "80GiB" or "1.5 GB"; a number without unit is of bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*(\w*)\s*", given)
    size = float(found[1]) * _SIZES.get(found[2] or "B", 0.0) if found else 0.0
    if not 0 < size < math.inf:  # an unknown unit gives 0 or NaN
        known = ", ".join(_SIZES)
        raise InvalidArgumentError(
            f"a size must be a number above 0 with a unit of {known}, got {given!r}"
        )
    return int(size)


def in_bytes(size: float) -> str:
    """Return bytes in a suitable unit."""
    return _scaled(size, _BINARY)


def in_seconds(seconds: float) -> str:
    """Return a time in a suitable unit."""
    return _scaled(seconds, {"s": 1.0, "ms": 1e-3, "µs": 1e-6})


def in_short(count: float) -> str:
    """Return a large number in at most five characters, such as 1.23M."""
    return _scaled(count, {"T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3, "": 1.0}).replace(" ", "")


def _scaled(number: float, units: Mapping[str, float]) -> str:
    """Return three significant digits, or all before the decimal point, in the largest unit."""
    unit = next((unit for unit, scale in units.items() if number >= scale), [*units][-1])
    scaled = number / units[unit]
    return f"{scaled:.3g} {unit}" if scaled < 999.5 else f"{scaled:,.0f} {unit}"

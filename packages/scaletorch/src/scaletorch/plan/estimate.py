"""The cost of a layout: memory of its pipeline ranks, seconds of its step; numbers with units."""

from __future__ import annotations

import math
import re
from dataclasses import astuple, dataclass

from ..dist.errors import InvalidArgumentError
from .description import Layout

_SIZES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
          "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}  # fmt: skip


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
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{_three(size / 2**power)} {unit}"
    return f"{size:.0f} B"


def in_seconds(seconds: float) -> str:
    """Return a time in a suitable unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{_three(seconds * scale)} {unit}"
    return f"{_three(seconds * 1e6)} µs"


def in_short(count: float) -> str:
    """Return a large number in at most five characters, such as 1.23M."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g}{unit}"
    return f"{count:.3g}"


def _three(number: float) -> str:
    """Return three significant digits, or all digits before the decimal point."""
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"

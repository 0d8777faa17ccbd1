"""What saves memory on a layout, as little of it as lets the layout fit; or why none of it does.

Bounds of a peak tell that of most layouts. Of the others only the peak itself does, which takes as
long as the bounds of many: it is worked out for those alone that somebody comes to look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..parallel.pg_manager import Grid, count_communicators
from .clusters import Device
from .description import Description
from .holding import Holdings
from .layout import Layout, Recompute
from .memory import Bounds, Peaks, exactly, known_to_be
from .options import Options, Refused, ladder
from .units import in_bytes


class Bounded(NamedTuple):
    """A layout with bounds of its peak.

    Attributes:
        bounds: Of its peak, or of what is there before a step.
        layout: With what saves memory.
        less: The same with less of it: these may fit, and this one counts only if none does.
    """

    bounds: Bounds
    layout: Layout
    less: tuple[Bounded, ...] = ()


class Room:
    """The memory of a rank, and what its communicators leave of it.

    Args:
        device: Of a rank.
    """

    def __init__(self, device: Device) -> None:
        self.memory, self._group = device.memory, device.group_memory
        self._held: dict[Grid, int] = {}

    def held(self, layout: Layout) -> int:
        """Return the bytes of a layout's communicators."""
        if not self._group:
            return 0
        if layout.grid not in self._held:
            self._held[layout.grid] = self._group * count_communicators(layout.grid)
        return self._held[layout.grid]

    def left(self, layout: Layout) -> int:
        """Return the bytes for all else."""
        return self.memory - self.held(layout)


class Fits:
    """Tells whether layouts fit, and would not with less of what saves memory.

    Args:
        known: Of the model.
        room: Of a rank.
    """

    def __init__(self, known: Holdings, room: Room) -> None:
        self.known, self.room = known, room
        self._peaks: dict[Layout, int] = {}

    def peak(self, own: Bounded) -> int:
        """Return the peak of a layout, which is worked out once."""
        if own.layout not in self._peaks:
            self._peaks[own.layout] = exactly(self.known, own.layout, own.bounds)
        return self._peaks[own.layout]

    def __call__(self, own: Bounded) -> bool:
        """Return that of one; its peak is worked out only if bounds leave it open."""
        left = self.room.left(own.layout)
        fits = own.bounds.fits(left)
        if fits is None:
            fits = self.peak(own) <= left
        return fits and not any(map(self, own.less))


class Over(NamedTuple):
    """A layout that takes more memory than there is, with what is nearest to fit.

    Attributes:
        bounds: Of its peak, or of what is there before a step.
        layout: Without what saves memory.
        recompute: What runs again.
        zero: Stage of ZeRO.
        early: Whether it is too much before a step.
    """

    bounds: Bounds
    layout: Layout
    recompute: Recompute
    zero: int
    early: bool

    def bounded(self) -> Bounded:
        """Return the bounds, and the layout with what saves memory."""
        return Bounded(self.bounds, self.layout.saving(self.recompute, self.zero))

    def seen(self, fits: Fits, open_: Sequence[Bounded]) -> Over:
        """Return it with the least peak of layouts that were open until all peaks were known."""
        own = min(open_, key=fits.peak)
        bounds, layout = known_to_be(fits.peak(own)), own.layout
        return self._replace(bounds=bounds, recompute=layout.recompute, zero=layout.zero)

    def refused(self, room: Room) -> Refused:
        """Return it with the reason."""
        own, all_ = self.bounds.above(room.held(self.layout)), in_bytes(room.memory)
        how = f"with zero {self.zero}"
        if self.early:
            why = f"needs {in_bytes(own.least)} of {all_} before a step, {how}"
        else:
            why = f"needs {_needs(own)} of {all_}, {how} and recompute {self.recompute}"
        return Refused(self.layout.grid, why, self.bounded().layout)


def fitting(
    known: Holdings, layout: Layout, memory: int, options: Options
) -> tuple[list[Bounded], Over | None]:
    """Return those with the least of what saves memory that may fit; and what is near.

    What is too much before a step begins is so whatever runs again. Nothing is near if one
    surely fits.
    """
    found: list[tuple[int, int]] = []
    may: dict[tuple[int, int], Bounded] = {}
    near: tuple[Bounds, Recompute, int] | None = None
    before: dict[int, int] = {}
    peaks = Peaks(known, layout, memory)
    again = _described(known.description, layout, options)
    for step, recompute, zero in ladder(layout, options, found):
        if zero not in before:
            before[zero] = peaks.before(zero)
        if before[zero] > memory or recompute not in again:
            continue
        own = peaks(recompute, zero)
        fits = own.fits(memory)
        if fits is not False:
            less = tuple([each for at, each in may.items() if at not in found and _less(at, step)])
            may[step] = Bounded(own, layout.saving(recompute, zero), less)
        if fits:
            found.append(step)
        elif near is None or own.least < near[0].least:
            near = own, recompute, zero
    if found or not before:
        return [*may.values()], None
    if near is not None:
        return [*may.values()], Over(near[0], layout, *near[1:], early=False)
    zero = min(before, key=lambda zero: (before[zero], -zero))
    return [], Over(Bounds(before[zero], None), layout, again[-1], zero, early=True)


def _less(step: tuple[int, int], other: tuple[int, int]) -> bool:
    return step[0] <= other[0] and step[1] <= other[1]


def _needs(own: Bounds) -> str:
    return f"{'' if own.most == own.least else 'at least '}{in_bytes(own.least)}"


def _described(description: Description, layout: Layout, options: Options) -> list[Recompute]:
    """Return what may run again: not each cut is described with selective recomputation."""
    return [
        each
        for each in options.recompute
        if (each == "selective") == (layout.recompute == "selective")
        or layout.saving(each, layout.zero).cut in description.cuts
    ]

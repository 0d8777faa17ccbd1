"""What saves memory on a layout, as little of it as lets the layout fit; or why none of it does."""

from __future__ import annotations

from typing import NamedTuple

from .description import Description
from .holding import Holdings
from .layout import Layout, Recompute
from .memory import Bounds, Peaks
from .options import Options, Refused, ladder
from .units import in_bytes

Bounded = tuple[Bounds, Layout]  # of a layout's peak, and the layout


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
        return self.bounds, self.layout.saving(self.recompute, self.zero)

    def refused(self, memory: int) -> Refused:
        """Return it with the reason."""
        own, room = self.bounds, in_bytes(memory)
        how = f"with zero {self.zero}"
        if self.early:
            why = f"needs {in_bytes(own.least)} of {room} before a step, {how}"
        else:
            why = f"needs {_needs(own, memory)} of {room}, {how} and recompute {self.recompute}"
        return Refused(self.layout.grid, why, self.bounded()[1])


def fitting(
    known: Holdings, layout: Layout, memory: int, options: Options
) -> tuple[list[Bounded], Over | None]:
    """Return those with the least of what saves memory that fit; or one that is near.

    What is too much before a step begins is so whatever runs again.
    """
    found: list[tuple[int, int]] = []
    fits: list[Bounded] = []
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
        if own.most is not None and own.most <= memory:
            found.append(step)
            fits.append((own, layout.saving(recompute, zero)))
        elif near is None or own.least < near[0].least:
            near = own, recompute, zero
    if fits or not before:
        return fits, None
    if near is not None:
        return [], Over(near[0], layout, *near[1:], early=False)
    zero = min(before, key=lambda zero: (before[zero], -zero))
    return [], Over(Bounds(before[zero], None), layout, again[-1], zero, early=True)


def _needs(own: Bounds, memory: int) -> str:
    if own.most == own.least:
        return in_bytes(own.least)
    if own.most is None or own.least > memory:
        return f"at least {in_bytes(own.least)}"
    return f"up to {in_bytes(own.most)}"


def _described(description: Description, layout: Layout, options: Options) -> list[Recompute]:
    """Return what may run again: not each cut is described with selective recomputation."""
    return [
        each
        for each in options.recompute
        if (each == "selective") == (layout.recompute == "selective")
        or layout.saving(each, layout.zero).cut in description.cuts
    ]

"""The columns of a plan's two tables: which layout is best, and what each holds and sends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..estimate import Estimate
from ..units import in_seconds, in_short
from .shown import AXES, GIB, MIB, SORTS, Shown, options_of, sent_by_axis, sizes_of

LEFT = ("DPxPPxCPxTP", "options")  # columns of words
SHORT = dict(zip(SORTS, ("param", "grad", "optim", "activ", "working", "buffers"), strict=True))


class Column(NamedTuple):
    """A column: its heading, what stands in it, and whether it is left out for want of room."""

    heading: str
    cells: Iterable[str]
    spare: int = 0


def common(listed: Sequence[Estimate]) -> list[str]:
    """Return the options that all layouts have, if they are several."""
    options = [options_of(each.layout) for each in listed]
    found = [word for word in options[0] if all(word in own for own in options)]
    return found if len(listed) > 1 else []


def ranked(shown: Shown, listed: Sequence[Estimate], shared: list[str]) -> list[Column]:
    """Return the columns that tell which is best."""

    def words(each: Estimate) -> str:
        return ", ".join(word for word in options_of(each.layout) if word not in shared)

    columns = [
        *_names(listed),
        Column("options", [words(each) for each in listed]),
        Column(
            "GiB ",
            [f"{gib(each.peak)}{' ' if shown.fits(each) else '!'}" for each in listed],
        ),
    ]
    if any(each.time for each in listed):
        times = [each.time for each in listed]
        columns += [
            Column("bubble", [f"{time.bubble:.1%}" if time else "" for time in times], 1),
            Column("step", [in_seconds(time.step) if time else "" for time in times]),
            Column("tokens/s", [in_short(shown.tokens_per_second(each)) for each in listed]),
        ]
    return columns


def held(listed: Sequence[Estimate]) -> list[Column]:
    """Return the columns that tell what the fullest rank holds and what a rank sends."""
    fullest = [each.memory[each.fullest] for each in listed]
    sent = [sent_by_axis(each) for each in listed]
    columns = _names(listed)
    for sort, heading in SHORT.items():
        sizes = [getattr(memory, sort) for memory in fullest]
        columns.append(Column(f"GiB {heading}" if sort == SORTS[0] else heading, map(gib, sizes)))
    if any(each.communicators for each in listed):
        columns.append(Column("groups", [gib(each.communicators) for each in listed]))
    total = [sum(own.values()) for own in sent]
    columns.append(Column("MiB sent", [f"{size / MIB:,.0f}" for size in total]))
    for axis in AXES:
        if any(own[axis] for own in sent):
            columns.append(Column(axis, [f"{own[axis] / MIB:,.0f}" for own in sent], 1))
    return columns


def _names(listed: Sequence[Estimate]) -> list[Column]:
    return [
        Column("", map(str, range(1, len(listed) + 1))),
        Column("DPxPPxCPxTP", [sizes_of(each.layout) for each in listed]),
    ]


def gib(size: float) -> str:
    """Return GiB with two digits behind the point, if there is room."""
    return f"{size / GIB:.2f}" if size < 100 * GIB else f"{size / GIB:.0f}"

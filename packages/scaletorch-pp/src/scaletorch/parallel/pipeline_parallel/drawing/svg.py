"""Timelines above each other as SVG, without any library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.etree import ElementTree as Xml

from ..schedules.schedule import Action, Span, Timeline
from .figures import LOOKS, busy, figures, named, num_chunks, with_unit

WIDTH, LEFT, RIGHT = 1000, 60, 20
ROW, GAP, TITLE, FONT = 24, 4, 34, 11
LEGEND = 24
_DIGIT = 0.62 * FONT  # width of a character, roughly
_EDGED = 2  # edges of narrower boxes would hide them
_TICKS = 12  # at most

_PALEST = 0.6  # fraction of white in the last chunk
# What is no colour of an action has a class too, so that a page can show it on a dark ground.
_PAPER, _IDLE, _INK = ("#ffffff", "paper"), ("#eeeeee", "idle"), ("#000000", "ink")


def to_svg(*timelines: Timeline, titles: Sequence[str] = ()) -> str:
    """Draw timelines above each other on one time axis, that of the first.

    One with another unit of time is scaled until its actions together take as long as those of
    the first: so a measured step stands below its prediction, and only the idle time differs.

    Args:
        timelines: Predicted or measured, at least one.
        titles: One for each; none for the names of the schedules.

    Raises:
        InvalidArgumentError: No timeline, one without time, or not one title for each.
    """
    root = drawn(timelines, titles)
    Xml.indent(root)
    return Xml.tostring(root, encoding="unicode") + "\n"


def drawn(timelines: Sequence[Timeline], titles: Sequence[str]) -> Xml.Element:
    """Return the picture of `to_svg` as an element of rectangles, texts and lines.

    The ground is of class "paper", idle time of "idle", text and lines outside boxes of "ink".
    """
    names = named(timelines, titles)
    first = timelines[0]
    units = [1.0 if t.unit == first.unit else busy(first) / busy(t) for t in timelines]
    end = max(t.makespan * unit for t, unit in zip(timelines, units, strict=True))
    root = Xml.Element("svg", xmlns="http://www.w3.org/2000/svg")
    root.attrib |= {"font-family": "sans-serif", "font-size": str(FONT)}
    ground = {"width": "100%", "height": "100%", "fill": _PAPER[0], "class": _PAPER[1]}
    Xml.SubElement(root, "rect", ground)
    top = _legend(root, timelines)
    for timeline, name, unit in zip(timelines, names, units, strict=True):
        title = f"{name}: {figures(timeline)}"
        if unit != 1:
            title += f" (1 on the axis is {with_unit(1 / unit, timeline.unit)})"
        _text(root, LEFT, top + TITLE - 10, title, weight="bold")
        top = _rows(root, timeline, top + TITLE, unit, (WIDTH - LEFT - RIGHT) / end)
    _axis(root, top, end, first.unit)
    root.set("viewBox", f"0 0 {WIDTH} {top + 44:g}")
    return root


def ticks(end: float) -> list[float]:
    """Return round times from 0 to `end`, a dozen at most."""
    power = 10.0 ** math.floor(math.log10(end / _TICKS))
    step = next(power * s for s in (1, 2, 5, 10) if end / (power * s) <= _TICKS)
    return [i * step for i in range(math.floor(end / step) + 1)]


def _legend(root: Xml.Element, timelines: Sequence[Timeline]) -> float:
    """Draw one box for each kind and chunk, in lines; return the top of the next thing."""
    drawn_in = {
        (list(LOOKS).index(span.action.kind), span.action.chunk, num_chunks(each.schedule))
        for each in timelines
        for span in each.spans
    }
    several = any(chunk for _, chunk, _ in drawn_in)
    found: dict[tuple[int, int, str], str] = {}
    for place, chunk, chunks in drawn_in:
        kind, look = list(LOOKS.items())[place]
        name = f"{kind} {look.name}" + (f", chunk {chunk}" if several else "")
        found[place, chunk, _colours(Action(kind, 0, chunk), chunks)[0]] = name
    left, top = float(LEFT), 10.0
    for (_, _, fill), name in sorted(found.items()):
        width = 24 + len(name) * _DIGIT
        if left + width > WIDTH:
            left, top = float(LEFT), top + LEGEND
        _rect(root, left, top, 12, 12, fill)
        _text(root, left + 17, top + 10, name)
        left += width
    return top + LEGEND


def _rows(root: Xml.Element, timeline: Timeline, top: float, unit: float, scale: float) -> float:
    """Draw one row for each rank; `unit` makes times those of the axis, `scale` columns."""
    schedule, first = timeline.schedule, min(s.start for s in timeline.spans)
    for rank in range(schedule.num_ranks):
        row = top + rank * ROW
        _text(root, LEFT - 8, row + 14, f"rank {rank}", anchor="end")
        _rect(root, LEFT, row, timeline.makespan * unit * scale, ROW - GAP, *_IDLE)
    for span in timeline.spans:
        start, end = (span.start - first) * unit, (span.end - first) * unit
        stage = schedule.stages[span.rank][span.action.chunk]
        box = span._replace(start=start, end=end)
        _box(root, box, stage, num_chunks(schedule), top + span.rank * ROW, scale)
    return top + schedule.num_ranks * ROW


def _box(root: Xml.Element, span: Span, stage: int, chunks: int, top: float, scale: float) -> None:
    _, action, start, end = span
    fill, ink = _colours(action, chunks)
    left, width = LEFT + start * scale, (end - start) * scale
    rect = _rect(root, left, top, width, ROW - GAP, fill)
    if width > _EDGED:
        rect.attrib |= {"stroke": "#ffffff", "stroke-width": "0.5"}
    hover = f"{action}, stage {stage}: {start:.6g} to {end:.6g}"
    Xml.SubElement(rect, "title").text = hover
    number = str(action.micro_batch)
    if width >= len(number) * _DIGIT + 2:
        _text(root, left + width / 2, top + 14, number, anchor="middle", ink=(ink, ""))


def _colours(action: Action, chunks: int) -> tuple[str, str]:
    """Return fill and ink; later chunks are paler."""
    white = _PALEST * action.chunk / max(chunks - 1, 1)
    red, green, blue = (round(c + (255 - c) * white) for c in LOOKS[action.kind].colour)
    ink = "#000000" if 0.3 * red + 0.59 * green + 0.11 * blue > 130 else "#ffffff"
    return f"#{red:02x}{green:02x}{blue:02x}", ink


def _axis(root: Xml.Element, top: float, end: float, unit: str) -> None:
    scale = (WIDTH - LEFT - RIGHT) / end
    line = {"stroke": _INK[0], "class": _INK[1]}
    Xml.SubElement(
        root, "line", line, x1=str(LEFT), x2=str(WIDTH - RIGHT), y1=f"{top:g}", y2=f"{top:g}"
    )
    for time in ticks(end):
        x = f"{LEFT + time * scale:.2f}"
        Xml.SubElement(root, "line", line, x1=x, x2=x, y1=f"{top:g}", y2=f"{top + 5:g}")
        _text(root, LEFT + time * scale, top + 18, with_unit(time, ""), anchor="middle")
    _text(
        root, (WIDTH + LEFT - RIGHT) / 2, top + 34, f"time ({unit})" if unit else "time", "middle"
    )


def _rect(
    root: Xml.Element,
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    kind: str = "",
) -> Xml.Element:
    size = {"x": x, "y": y, "width": width, "height": height}
    given = {k: f"{v:.2f}" for k, v in size.items()} | ({"class": kind} if kind else {})
    return Xml.SubElement(root, "rect", given, fill=fill)


def _text(
    root: Xml.Element,
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    ink: tuple[str, str] = _INK,
    weight: str = "normal",
) -> None:
    fill, kind = ink
    place = {"x": f"{x:.2f}", "y": f"{y:.2f}", "text-anchor": anchor, "font-weight": weight}
    place |= {"class": kind} if kind else {}
    Xml.SubElement(root, "text", place, fill=fill).text = text

"""Timelines above each other as SVG, without any library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.etree import ElementTree as Xml

from ..schedules.timeline import Timeline
from .panels import Box, Panel, legend, panels, with_unit

WIDTH, LEFT, RIGHT = 1000, 60, 20
ROW, GAP, TITLE, FONT = 24, 4, 34, 11
LEGEND = 24
_DIGIT = 0.62 * FONT  # width of a character, roughly
_EDGED = 2  # edges of narrower boxes would hide them
_TICKS = 12  # at most


def to_svg(*timelines: Timeline, titles: Sequence[str] = ()) -> str:
    """Draw timelines above each other on one time axis, that of the first.

    One with another unit of time is scaled until its actions together take as long as those of
    the first: so a measured step stands below its prediction, and what differs is the idle time.

    Args:
        timelines: Predicted or measured, at least one.
        titles: One for each; none for the names of the schedules.

    Raises:
        InvalidArgumentError: No timeline, one without time, or not one title for each.
    """
    shown = panels(timelines, titles)
    end = max(panel.end for panel in shown)
    root = Xml.Element("svg", xmlns="http://www.w3.org/2000/svg")
    root.attrib |= {"font-family": "sans-serif", "font-size": str(FONT)}
    Xml.SubElement(root, "rect", width="100%", height="100%", fill="#ffffff")
    top = _legend(root, shown)
    for panel in shown:
        top = _panel(root, panel, top, (WIDTH - LEFT - RIGHT) / end)
    _axis(root, top, end, timelines[0].unit)
    root.set("viewBox", f"0 0 {WIDTH} {top + 44:g}")
    Xml.indent(root)
    return Xml.tostring(root, encoding="unicode") + "\n"


def ticks(end: float) -> list[float]:
    """Return round times from 0 to ``end``, a dozen at most."""
    power = 10.0 ** math.floor(math.log10(end / _TICKS))
    step = next(power * s for s in (1, 2, 5, 10) if end / (power * s) <= _TICKS)
    return [i * step for i in range(math.floor(end / step) + 1)]


def _legend(root: Xml.Element, shown: Sequence[Panel]) -> float:
    """Draw one box for each kind and chunk, in lines; return where the next thing begins."""
    left, top = float(LEFT), 10.0
    for fill, name in legend(shown):
        width = 24 + len(name) * _DIGIT
        if left + width > WIDTH:
            left, top = float(LEFT), top + LEGEND
        _rect(root, left, top, 12, 12, fill)
        _text(root, left + 17, top + 10, name)
        left += width
    return top + LEGEND


def _panel(root: Xml.Element, panel: Panel, top: float, scale: float) -> float:
    _text(root, LEFT, top + TITLE - 10, panel.title, weight="bold")
    top += TITLE
    for rank in range(panel.num_ranks):
        row = top + rank * ROW
        _text(root, LEFT - 8, row + 14, f"rank {rank}", anchor="end")
        _rect(root, LEFT, row, panel.end * scale, ROW - GAP, "#eeeeee")
    for box in panel.boxes:
        _box(root, box, top + box.rank * ROW, scale)
    return top + panel.num_ranks * ROW


def _box(root: Xml.Element, box: Box, top: float, scale: float) -> None:
    left, width = LEFT + box.start * scale, (box.end - box.start) * scale
    rect = _rect(root, left, top, width, ROW - GAP, box.fill)
    if width > _EDGED:
        rect.attrib |= {"stroke": "#ffffff", "stroke-width": "0.5"}
    hover = f"{box.action}, stage {box.stage}: {box.start:.6g} to {box.end:.6g}"
    Xml.SubElement(rect, "title").text = hover
    number = str(box.action.micro_batch)
    if width >= len(number) * _DIGIT + 2:
        _text(root, left + width / 2, top + 14, number, anchor="middle", fill=box.ink)


def _axis(root: Xml.Element, top: float, end: float, unit: str) -> None:
    scale = (WIDTH - LEFT - RIGHT) / end
    line = {"stroke": "#000000"}
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
    root: Xml.Element, x: float, y: float, width: float, height: float, fill: str
) -> Xml.Element:
    size = {"x": x, "y": y, "width": width, "height": height}
    return Xml.SubElement(root, "rect", {k: f"{v:.2f}" for k, v in size.items()}, fill=fill)


def _text(
    root: Xml.Element,
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    fill: str = "#000000",
    weight: str = "normal",
) -> None:
    place = {"x": f"{x:.2f}", "y": f"{y:.2f}", "text-anchor": anchor, "font-weight": weight}
    Xml.SubElement(root, "text", place, fill=fill).text = text

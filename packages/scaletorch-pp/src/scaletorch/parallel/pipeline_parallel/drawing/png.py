"""Timelines above each other as PNG, through matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING
from xml.etree import ElementTree as Xml

from ....dist.errors import InvalidArgumentError
from ..schedules.schedule import Timeline
from .svg import FONT, drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Rectangle

_PER_INCH = 72  # units of the SVG, so that a font's size is the same number in both
_ALIGNED = {"start": "left", "middle": "center", "end": "right"}


def to_png(path: str | PathLike[str], *timelines: Timeline, titles: Sequence[str] = ()) -> None:
    """Write the picture of `to_svg` as a PNG.

    Args:
        path: The file to write.
        timelines: Predicted or measured, at least one.
        titles: One for each; none for the names of the schedules.

    Raises:
        InvalidArgumentError: Matplotlib is missing, and the errors of `to_svg`.
    """
    paint(path, drawn(timelines, titles))


def paint(path: str | PathLike[str], root: Xml.Element) -> None:
    """Write rectangles, texts and lines of an SVG, as `drawn` makes them, as a PNG.

    Raises:
        InvalidArgumentError: Matplotlib is missing.
    """
    try:
        from matplotlib.collections import PatchCollection
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidArgumentError(
            'a PNG needs matplotlib: pip install "scaletorch-pp[drawing]"; an SVG needs nothing'
        ) from error
    width, height = (float(size) for size in root.attrib["viewBox"].split()[2:])
    figure = Figure(figsize=(width / _PER_INCH, height / _PER_INCH))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    # Rectangles as one collection, below lines and texts: each on its own would take milliseconds.
    boxes = [_box(element) for element in root if element.tag == "rect" and "x" in element.attrib]
    axes.add_collection(PatchCollection(boxes, match_original=True))
    for element in root:
        _write(axes, element)
    figure.savefig(path, dpi=120, format="png")


def _box(element: Xml.Element) -> Rectangle:
    from matplotlib.patches import Rectangle

    given = element.attrib
    x, y, width, height = (float(given[name]) for name in ("x", "y", "width", "height"))
    edge, line = given.get("stroke", "none"), float(given.get("stroke-width", 0))
    return Rectangle((x, y), width, height, fc=given["fill"], ec=edge, lw=line)


def _write(axes: Axes, element: Xml.Element) -> None:
    given = element.attrib
    if element.tag == "line":
        ends = ((float(given["x1"]), float(given["x2"])), (float(given["y1"]), float(given["y2"])))
        axes.plot(*ends, color=given["stroke"], linewidth=1)
    elif element.tag == "text":
        axes.text(
            float(given["x"]), float(given["y"]), element.text or "",
            fontsize=float(given.get("font-size", FONT)),
            fontfamily=given.get("font-family", "sans-serif"),
            color=given["fill"], horizontalalignment=_ALIGNED[given["text-anchor"]],
            fontweight=given["font-weight"], verticalalignment="baseline",
        )  # fmt: skip

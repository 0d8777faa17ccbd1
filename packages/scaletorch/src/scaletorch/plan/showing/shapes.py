"""Rectangles, texts and lines of pictures, which a page and a PNG draw from.

They have the attributes that the pictures of schedules have, so that one painter draws all; and
classes ("ink", "paper", "idle"), by which a page shows them on a dark ground.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as Xml

WIDTH, LEFT, RIGHT, FONT = 1000, 60, 20, 11
DIGIT = 0.62 * FONT  # width of a character, roughly


def picture() -> Xml.Element:
    """Return an empty picture; `close` gives it its size."""
    root = Xml.Element("svg", xmlns="http://www.w3.org/2000/svg", role="img")
    root.attrib |= {"font-family": "sans-serif", "font-size": str(FONT)}
    ground = {"width": "100%", "height": "100%", "fill": "#ffffff", "class": "paper"}
    Xml.SubElement(root, "rect", ground)
    return root


def close(root: Xml.Element, height: float) -> Xml.Element:
    """Give a picture its height and return it."""
    root.set("viewBox", f"0 0 {WIDTH} {height:g}")
    return root


def box(
    root: Xml.Element, x: float, y: float, width: float, height: float, fill: str, hover: str = ""
) -> Xml.Element:
    """Add a rectangle, with a text for those who point at it."""
    size = {"x": x, "y": y, "width": width, "height": height}
    rect = Xml.SubElement(root, "rect", {k: f"{v:.2f}" for k, v in size.items()}, fill=fill)
    if hover:
        Xml.SubElement(rect, "title").text = hover
    return rect


def text(root: Xml.Element, x: float, y: float, words: str, **style: str) -> None:
    """Add a line of text, black on white and white on black unless it has a `fill`."""
    place = {"x": f"{x:.2f}", "y": f"{y:.2f}", "text-anchor": "start", "font-weight": "normal"}
    place |= {name.replace("_", "-"): value for name, value in style.items()}
    if "fill" not in place:
        place |= {"fill": "#000000", "class": "ink"}
    Xml.SubElement(root, "text", place).text = words


def line(root: Xml.Element, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Add a thin line."""
    place = dict(zip(("x1", "y1", "x2", "y2"), map("{:.2f}".format, (*start, *end)), strict=True))
    Xml.SubElement(root, "line", place | {"stroke": "#000000", "class": "ink"})


def legend(root: Xml.Element, top: float, said: Sequence[tuple[str, str]]) -> float:
    """Add a box for each colour with what it says, in lines; return the top of the next thing."""
    left = float(LEFT)
    for fill, words in said:
        width = 30 + len(words) * DIGIT
        if left + width > WIDTH - RIGHT and left > LEFT:
            left, top = float(LEFT), top + 20
        box(root, left, top, 12, 12, fill)
        text(root, left + 17, top + 10, words)
        left += width
    return top + 28


def ink(fill: str) -> str:
    """Return black or white, whichever is read on a colour."""
    red, green, blue = (int(fill[at : at + 2], 16) for at in (1, 3, 5))
    return "#000000" if 0.3 * red + 0.59 * green + 0.11 * blue > 130 else "#ffffff"

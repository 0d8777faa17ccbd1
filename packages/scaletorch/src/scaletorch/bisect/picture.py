"""The model as a picture: each module from top to bottom, what of it is right and what is wrong."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from xml.etree import ElementTree as Xml

ROW, INDENT, MARGIN, FONT = 22, 18, 16, 13
LETTER = 0.6 * FONT  # width of a character, at most
FORWARD, BACKWARD, NAMES = 54, 142, 198  # where the columns are
FOLDED = 3  # layers in a row that are shown as one, if nothing was born in them
LINE = 90  # letters of a title's line

# What a mark says; its colour is of Paul Tol's vibrant scheme, and each has a shape of its own.
STATES = {
    "born": ("#cc3311", "wrong, though all it was computed from is right"),
    "bad": ("#ee7733", "wrong, and where that comes from is not known"),
    "downstream": ("#997700", "wrong, as is what it was computed from"),
    "good": ("#0077bb", "right"),
    "unseen": ("#777777", "not compared"),
}
SHAPES = {
    "born": "M0 -9 L9 0 L0 9 L-9 0 Z",
    "bad": "M-7 -7 H7 V7 H-7 Z",
    "downstream": "M-6.5 -5 H6.5 L0 6.5 Z",
    "good": "M-6 0 A6 6 0 1 0 6 0 A6 6 0 1 0 -6 0 Z",
    "unseen": "M-5 0 H5",
}
INNER = {"born": "M0 -5 V1.5 M0 3.6 V5.2", "bad": "M-3.5 -3.5 L3.5 3.5 M-3.5 3.5 L3.5 -3.5"}
HOLLOW = ("downstream", "good", "unseen")
LOUD = ("born", "bad")  # never folded
INK, PALE, FAINT, PAPER, STRESS = "#1a1a1a", "#555555", "#dddddd", "#ffffff", "#fdebe6"


@dataclass(frozen=True, slots=True)
class Drawn:
    """What is known of a module.

    Attributes:
        module: Its name in the model; '' is the model.
        forward: Of its outputs; one of `STATES`, anything else is 'unseen'.
        backward: Of the gradients; as `forward`.
    """

    module: str
    forward: str
    backward: str


class Row(NamedTuple):
    """A line of the picture: a module, or several that are the same."""

    depth: int
    name: str
    note: str
    drawn: Drawn


def svg(drawn: Sequence[Drawn], title: str) -> str:
    """Return a picture of a model's modules as SVG; the text in it can be selected.

    Args:
        drawn: The modules in the order in which they are called or named.
        title: What is said above the picture.
    """
    rows = list(_rows(drawn))
    titles = textwrap.wrap(_text_of(title), LINE) or [""]
    root = Xml.Element("svg", xmlns="http://www.w3.org/2000/svg", role="img")
    root.attrib |= {"font-family": "ui-monospace, Menlo, Consolas, monospace"}
    root.attrib |= {"font-size": str(FONT)}
    Xml.SubElement(root, "title").text = " ".join(titles)
    paper = Xml.SubElement(root, "rect", x="0.5", y="0.5", rx="8", fill=PAPER, stroke=FAINT)
    top = MARGIN + ROW / 2
    for line in titles:
        _write(root, MARGIN, top, line, bold=True)
        top += ROW
    top += ROW / 4
    top = _legend(root, {state for row in rows for state in _states(row.drawn)}, top)
    _write(root, FORWARD, top, "forward ↓", middle=True)
    _write(root, BACKWARD, top, "backward ↑", middle=True)
    _write(root, NAMES, top, "module")
    width = max([_width(row) for row in rows] + [MARGIN + LETTER * len(line) for line in titles])
    width = max(width, NAMES + 56 * LETTER) + MARGIN
    for row in rows:
        top += ROW
        _row(root, row, top, width)
    height = top + ROW / 2 + MARGIN
    paper.attrib |= {"width": f"{width - 1:g}", "height": f"{height - 1:g}"}
    root.attrib |= {"width": f"{width:g}", "height": f"{height:g}"}
    root.attrib |= {"viewBox": f"0 0 {width:g} {height:g}"}
    Xml.indent(root)
    return Xml.tostring(root, encoding="unicode") + "\n"


def _rows(drawn: Sequence[Drawn]) -> Iterator[Row]:
    """Yield the lines: each module below the nearest one whose name its own begins with."""
    known = {each.module: each for each in drawn}
    children: dict[str | None, list[str]] = {}
    for module in known:
        children.setdefault(_parent(module, known), []).append(module)
    yield from _below(None, 0, known, children)


def _parent(module: str, known: dict[str, Drawn]) -> str | None:
    while module:
        module = module.rpartition(".")[0]
        if module in known:
            return module
    return None


def _below(
    parent: str | None, depth: int, known: dict[str, Drawn], children: dict[str | None, list[str]]
) -> Iterator[Row]:
    left = children.get(parent, [])
    while left:
        run = _run(left, known, children)
        module, left = left[0], left[len(run) :]
        name = module.removeprefix(f"{parent}." if parent else "") or "the model"
        if len(run) > 1:
            last = run[-1].rpartition(".")[2]
            yield Row(depth, f"{name}-{last}", _said(known[module]), known[module])
        elif _is_one(module, known, children) and module:
            inside = len(_inside(module, children)) - 1
            note = f"and {inside} inside" if inside else ""
            yield Row(depth, name, note, known[module])
        else:
            yield Row(depth, name, "", known[module])
            yield from _below(module, depth + 1, known, children)


def _run(
    modules: Sequence[str], known: dict[str, Drawn], children: dict[str | None, list[str]]
) -> Sequence[str]:
    """Return the first module, or the numbered ones from it on that can be shown as one line."""
    first, length = modules[0], 0
    prefix, _, number = first.rpartition(".")
    if not re.fullmatch(r"[0-9]{1,9}", number):
        return modules[:1]
    for module in modules:
        same = _states(known[module]) == _states(known[first])
        follows = module.rpartition(".")[::2] == (prefix, str(int(number) + length))
        if not (same and follows and _is_one(module, known, children)):
            break
        length += 1
    return modules[: length if length >= FOLDED else 1]


def _is_one(module: str, known: dict[str, Drawn], children: dict[str | None, list[str]]) -> bool:
    """Return whether all in a module is in one state, and nothing in it is of interest."""
    states = {_states(known[each]) for each in _inside(module, children)}
    return len(states) == 1 and not set(LOUD) & set(*states)


def _inside(module: str, children: dict[str | None, list[str]]) -> list[str]:
    return [module] + [m for child in children.get(module, []) for m in _inside(child, children)]


def _states(drawn: Drawn) -> tuple[str, str]:
    forward, backward = (s if s in STATES else "unseen" for s in (drawn.forward, drawn.backward))
    return forward, backward


def _said(drawn: Drawn) -> str:
    """Return the states in words: 'good', or both if they are not the same."""
    forward, backward = _states(drawn)
    return forward if forward == backward else f"forward {forward}, backward {backward}"


def _note(row: Row) -> str:
    born = [
        way
        for way, state in zip(("forward", "backward"), _states(row.drawn), strict=True)
        if state == "born"
    ]
    return f"← born here, in {' and '.join(born)}" if born else row.note


def _width(row: Row) -> float:
    return NAMES + row.depth * INDENT + LETTER * (len(row.name) + len(_note(row)) + 3)


def _row(root: Xml.Element, row: Row, top: float, width: float) -> None:
    forward, backward = _states(row.drawn)
    born = "born" in (forward, backward)
    if born:
        box = {"x": "6", "y": f"{top - ROW / 2:g}", "width": f"{width - 12:g}", "height": f"{ROW}"}
        Xml.SubElement(root, "rect", box, rx="4", fill=STRESS, stroke=STATES["born"][0])
    for step in range(row.depth):
        x = f"{NAMES + step * INDENT + 5:g}"
        Xml.SubElement(root, "path", d=f"M{x} {top - ROW / 2:g} v{ROW}", stroke=FAINT)
    _mark(root, FORWARD, top, forward)
    _mark(root, BACKWARD, top, backward)
    line = _write(root, NAMES + row.depth * INDENT, top, row.name, bold=born)
    if note := _note(row):
        pale = {} if born else {"fill": PALE}
        Xml.SubElement(line, "tspan", pale, dx=f"{LETTER:g}").text = f" {note}"


def _legend(root: Xml.Element, used: set[str], top: float) -> float:
    """Draw the marks that there are with what they say; return where the next line is."""
    for state, (_, says) in STATES.items():
        if state in used:
            _mark(root, MARGIN + 9, top, state)
            _write(root, MARGIN + 26, top, f"{state}: {says}")
            top += ROW
    return top + ROW / 2


def _mark(root: Xml.Element, x: float, y: float, state: str) -> None:
    colour = STATES[state][0]
    group = Xml.SubElement(root, "g", transform=f"translate({x:g} {y:g})", fill="none")
    group.attrib |= {"stroke-width": "2"}
    Xml.SubElement(group, "title").text = state
    fill = "none" if state in HOLLOW else colour
    Xml.SubElement(group, "path", d=SHAPES[state], stroke=colour, fill=fill)
    if state in INNER:
        Xml.SubElement(group, "path", d=INNER[state], stroke=PAPER)


def _write(
    root: Xml.Element, x: float, y: float, text: str, *, bold: bool = False, middle: bool = False
) -> Xml.Element:
    line = Xml.SubElement(root, "text", x=f"{x:g}", y=f"{y + 0.35 * FONT:g}", fill=INK)
    line.attrib |= {"font-weight": "bold"} if bold else {}
    line.attrib |= {"text-anchor": "middle"} if middle else {}
    line.text = _text_of(text)
    return line


def _text_of(text: str) -> str:
    """Return a text without what XML cannot hold."""
    return re.sub("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)

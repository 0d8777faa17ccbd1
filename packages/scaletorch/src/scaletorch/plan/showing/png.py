"""A plan as a PNG: the table and the pictures of the first layout, above each other."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as Xml

from ...parallel.pipeline_parallel.building import paint
from ..units import in_bytes
from .bars import bars
from .lanes import lanes
from .nodes import nodes
from .shapes import close, picture, text
from .shown import Shown, options_of, sizes_of
from .table import table

LINE, MARGIN = 15, 20
_DOWN = ("y", "y1", "y2")


def png(path: Path, shown: Shown, top: int = 10) -> None:
    """Write the table and the pictures of the first layout.

    Args:
        path: Of the file.
        shown: The plan.
        top: Layouts in the table.

    Raises:
        InvalidArgumentError: Matplotlib is missing.
    """
    root, height = picture(), MARGIN + 8.0
    for line in table(shown, top).splitlines():
        text(root, MARGIN, height, line, font_family="monospace", font_size="10")
        height += LINE
    if shown.estimates:
        best = shown.estimates[0]
        said = f"{sizes_of(best.layout)}, {', '.join(options_of(best.layout))}"
        figures = [(f"{said}: {in_bytes(best.peak)}", bars(best, shown.cluster.device.memory))]
        if best.layout.grid.pp > 1:
            figures.append(("what the pipeline computes when", lanes(shown, best.layout)))
        figures.append(("the ranks over the nodes", nodes(best.layout.grid, shown.cluster)))
        for title, figure in figures:
            height += 2 * LINE
            text(root, MARGIN, height, title, font_weight="bold", font_size="13")
            height = _below(root, figure, height + LINE)
    paint(path, close(root, height + MARGIN))


def _below(root: Xml.Element, figure: Xml.Element, top: float) -> float:
    """Add a figure's shapes to a picture; return the top of the next thing."""
    for shape in figure:
        for name in _DOWN:
            if name in shape.attrib:
                shape.set(name, f"{float(shape.attrib[name]) + top:g}")
        root.append(shape)
    return top + float(figure.attrib["viewBox"].split()[3])

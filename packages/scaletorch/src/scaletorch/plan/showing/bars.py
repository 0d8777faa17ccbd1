"""Memory of each rank of a pipeline as stacked bars."""

from __future__ import annotations

from xml.etree import ElementTree as Xml

from ..estimate import Estimate
from ..units import in_bytes
from .shapes import DIGIT, FONT, LEFT, RIGHT, WIDTH, box, close, ink, legend, line, picture, text
from .shown import SORTS

ROW, GAP = 24, 4
MOST = 32  # bars in a picture
TOTAL = 70  # width of what stands behind the bars
# Paul Tol's bright scheme, and grey.
COLOURS = dict(
    zip(SORTS, ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377"), strict=True)
)
SAYS = {
    "parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer's state",
    "activations": "activations", "working": "while a block runs", "buffers": "of communication",
}  # fmt: skip


def bars(estimate: Estimate, memory: int) -> Xml.Element:
    """Draw a bar for each rank of the pipeline, and where a device's memory ends.

    Args:
        estimate: A layout's.
        memory: Bytes of a device.
    """
    root = picture()
    held = [sort for sort in SORTS if any(getattr(each, sort) for each in estimate.memory)]
    top = legend(root, 10, [(COLOURS[sort], SAYS[sort]) for sort in held]) + 16
    scale = (WIDTH - LEFT - RIGHT - TOTAL) / max(estimate.peak, memory, 1)
    first = top
    for rank in _shown(estimate):
        text(root, LEFT - 8, top + 14, f"pp {rank}", text_anchor="end")
        left, own = float(LEFT), estimate.memory[rank]
        for sort in held:
            size = getattr(own, sort)
            _segment(root, left, top, size * scale, sort, size)
            left += size * scale
        heavy = "bold" if rank == estimate.fullest else "normal"
        at_end = {"text_anchor": "end", "font_weight": heavy}
        text(root, WIDTH - RIGHT, top + 14, in_bytes(own.total), **at_end)
        top += ROW
    if len(estimate.memory) > MOST:
        text(root, LEFT, top + 12, f"the {MOST} fullest of {len(estimate.memory)}")
        top += ROW
    end = LEFT + memory * scale
    line(root, (end, first - 6), (end, top))
    side = {"text_anchor": "end"} if end > WIDTH / 2 else {}
    text(root, end, first - 10, f"{in_bytes(memory)} of a device", **side)
    return close(root, top + 8)


def _shown(estimate: Estimate) -> list[int]:
    ranks = range(len(estimate.memory))
    fullest = sorted(ranks, key=lambda rank: estimate.memory[rank].total, reverse=True)
    return sorted(fullest[:MOST])


def _segment(
    root: Xml.Element, left: float, top: float, width: float, sort: str, size: int
) -> None:
    if width <= 0:
        return
    box(root, left, top, width, ROW - GAP, COLOURS[sort], f"{SAYS[sort]}: {in_bytes(size)}")
    words = in_bytes(size)
    if width >= len(words) * DIGIT + FONT:
        middle = {"text_anchor": "middle", "fill": ink(COLOURS[sort])}
        text(root, left + width / 2, top + 14, words, **middle)

"""A layout over the nodes: where the ranks are that a rank exchanges messages with."""

from __future__ import annotations

from xml.etree import ElementTree as Xml

from ...parallel.pg_manager import Grid
from ..clusters import Cluster
from .shapes import DIGIT, LEFT, RIGHT, WIDTH, box, close, ink, legend, picture, text

ROW, GAP, HIGHEST = 34, 6, 60  # pixels; of a rank's width
MOST = 32  # nodes in a picture
# Paul Tol's vibrant scheme; the others' grey is light and dark enough for both grounds.
COLOURS = {"tp": "#0077bb", "cp": "#33bbee", "pp": "#ee7733", "dp": "#009988", "ep": "#cc3311"}
ITSELF, OTHERS = "#444444", "#c8c8c8"
SHARES = {
    "tp": "weights of a layer", "cp": "a sequence", "pp": "the layers", "dp": "the batch",
}  # fmt: skip


def nodes(grid: Grid, cluster: Cluster) -> Xml.Element:
    """Draw a box for each rank in its node, coloured by the axis on which rank 0 meets it.

    Args:
        grid: The layout.
        cluster: Of which the innermost link joins the ranks of a node.
    """
    size = min(cluster.links[0].ranks if cluster.links else 1, grid.world_size)
    root = picture()
    top = legend(root, 10, _said(grid, cluster))
    axis_of = {rank: axis for axis in ("dp", "pp", "cp", "tp") for rank in grid.group(axis, 0)}
    axis_of[0] = ""
    experts = set(grid.group("ep", 0)) if grid.ep > 1 else set()
    width = min((WIDTH - LEFT - RIGHT) / size, 2 * HIGHEST)
    number = -(-grid.world_size // size)
    for node in range(min(number, MOST)):
        text(root, LEFT - 8, top + ROW / 2, f"node {node}", text_anchor="end")
        for rank in range(node * size, min((node + 1) * size, grid.world_size)):
            fill = ITSELF if rank == 0 else COLOURS.get(axis_of.get(rank, ""), OTHERS)
            rect = _rank(root, LEFT + rank % size * width, top, width - 2, rank, grid, fill)
            if rank in experts:
                rect.attrib |= {"stroke": COLOURS["ep"], "stroke-width": "3"}
        top += ROW
    if number > MOST:
        text(root, LEFT, top + 12, f"and {number - MOST} nodes more")
        top += ROW
    return close(root, top + 8)


def crossing(grid: Grid, cluster: Cluster, axis: str) -> str:
    """Return in words whether an axis leaves the nodes."""
    size = cluster.links[0].ranks if cluster.links else 1
    spanned = {rank // size for rank in grid.group(axis, 0)}
    return "inside a node" if len(spanned) == 1 else f"over {len(spanned)} nodes"


def _said(grid: Grid, cluster: Cluster) -> list[tuple[str, str]]:
    said = [(ITSELF, "rank 0")]
    for axis, shared in SHARES.items():
        if grid.size(axis) > 1:
            place = crossing(grid, cluster, axis)
            words = f"{axis} {grid.size(axis)}: shares {shared} with rank 0, {place}"
            said.append((COLOURS[axis], words))
    if grid.ep > 1:
        place = crossing(grid, cluster, "ep")
        said.append((COLOURS["ep"], f"edge: ep {grid.ep}: shares experts, {place}"))
    return [*said, (OTHERS, "no axis joins it to rank 0")]


def _rank(
    root: Xml.Element, left: float, top: float, width: float, rank: int, grid: Grid, fill: str
) -> Xml.Element:
    at = grid.coordinates(rank)
    rect = box(root, left, top, width, ROW - GAP, fill, f"rank {rank}: {at}")
    middle = {"text_anchor": "middle", "fill": ink(fill)}
    places = zip(at._fields, at, strict=True)
    where = " ".join(f"{axis}{place}" for axis, place in places if grid.size(axis) > 1)
    if width >= len(where) * 0.8 * DIGIT + 2:
        text(root, left + width / 2, top + 12, str(rank), **middle)
        text(root, left + width / 2, top + 24, where, font_size="9", **middle)
    elif width >= len(str(rank)) * DIGIT + 2:
        text(root, left + width / 2, top + 18, str(rank), **middle)
    return rect

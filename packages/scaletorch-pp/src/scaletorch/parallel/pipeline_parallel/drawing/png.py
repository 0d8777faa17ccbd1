"""Timelines above each other as PNG, through matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

from ....dist.errors import InvalidArgumentError
from ..schedules.timeline import Timeline
from .panels import Box, Panel, legend, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, ROW, AROUND = 12.0, 0.3, 0.7  # inches
_DIGIT = 0.09  # inches, width of a character, roughly
_EDGED = 0.03  # inches; edges of narrower boxes would hide them


def to_png(path: str | PathLike[str], *timelines: Timeline, titles: Sequence[str] = ()) -> None:
    """Write what ``to_svg`` draws into a PNG.

    Args:
        path: The file to write.
        timelines: Predicted or measured, at least one.
        titles: One for each; none for the names of the schedules.

    Raises:
        InvalidArgumentError: matplotlib is missing, and whatever ``to_svg`` refuses.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise InvalidArgumentError(
            'a PNG needs matplotlib: pip install "scaletorch-pp[drawing]"; an SVG needs nothing'
        ) from error
    shown = panels(timelines, titles)
    end = max(panel.end for panel in shown)
    heights = [panel.num_ranks * ROW + AROUND for panel in shown]
    figure = Figure(figsize=(WIDTH, sum(heights) + AROUND), layout="constrained")
    rows = figure.subplots(
        len(shown), sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for axes, panel in zip(rows[:, 0], shown, strict=True):
        _panel(axes, panel, end)
    unit = timelines[0].unit
    rows[-1, 0].set_xlabel(f"time ({unit})" if unit else "time")
    names = [Patch(color=fill, label=name) for fill, name in legend(shown)]
    figure.legend(handles=names, loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, dpi=120, format="png")


def _panel(axes: Axes, panel: Panel, end: float) -> None:
    axes.set_title(panel.title, loc="left", fontsize="medium")
    axes.set(xlim=(0, end), ylim=(panel.num_ranks - 0.5, -0.5))
    axes.set_yticks(range(panel.num_ranks), [f"rank {rank}" for rank in range(panel.num_ranks)])
    for rank in range(panel.num_ranks):
        _row(axes, rank, [box for box in panel.boxes if box.rank == rank], WIDTH / end)


def _row(axes: Axes, rank: int, boxes: list[Box], scale: float) -> None:
    widths = [box.end - box.start for box in boxes]
    axes.broken_barh(
        [(box.start, width) for box, width in zip(boxes, widths, strict=True)],
        (rank - 0.4, 0.8),
        facecolors=[box.fill for box in boxes],
        edgecolor="white",
        linewidth=[0.5 if width * scale > _EDGED else 0 for width in widths],
    )
    for box, width in zip(boxes, widths, strict=True):
        number = str(box.action.micro_batch)
        if width * scale >= len(number) * _DIGIT + 0.03:
            axes.text(
                box.start + width / 2, rank, number, color=box.ink, fontsize=8,
                horizontalalignment="center", verticalalignment="center",
            )  # fmt: skip

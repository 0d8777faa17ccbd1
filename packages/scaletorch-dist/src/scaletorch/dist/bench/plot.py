"""Times and bus bandwidths over sizes as a picture; matplotlib is an extra."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from ..errors import StateError
from .measure import Row

_STYLES = ("-", "--", ":")  # colours come again after ten


def require_matplotlib() -> None:
    """Find out before anything is measured that there would be no picture.

    Raises:
        StateError: With how to install it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise StateError("--plot needs matplotlib: pip install 'scaletorch-dist[plot]'")


def draw(rows: Sequence[Row], title: str, path: str) -> None:
    """Write a picture of two diagrams, in the format of the path's ending."""
    importlib.import_module("matplotlib").use("Agg")
    figure, axes = importlib.import_module("matplotlib.pyplot").subplots(1, 2, figsize=(13, 5.5))
    _lines(axes[0], rows, "seconds", 1e6, "µs a call")
    _lines(axes[1], rows, "bus_bandwidth", 1e-9, "bus bandwidth, GB/s")
    axes[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path)


def _lines(axis: Any, rows: Sequence[Row], what: str, scale: float, label: str) -> None:
    names = dict.fromkeys(row.call for row in rows if row.size)
    for place, name in enumerate(names):
        own = [row for row in rows if row.call == name]
        values = [getattr(row, what) * scale for row in own]
        axis.plot([row.size for row in own], values, _STYLES[place // 10], marker=".", label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("bytes")
    axis.set_ylabel(label)
    axis.grid(True, alpha=0.3)

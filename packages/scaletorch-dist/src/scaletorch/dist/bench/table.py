"""Rows and constants as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .measure import Row

HEAD = (
    f"{'call':22}{'size':>10}{'time µs':>11}{'least µs':>11}{'alg GB/s':>10}{'bus GB/s':>10}"
    f"{'calls':>8}"
)

DOUBTFUL = 0.3  # constants with larger relative errors say nothing


def size_text(size: int) -> str:
    """Return bytes in the largest unit that divides them."""
    for exponent, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size and size % (1 << exponent) == 0:
            return f"{size >> exponent} {unit}"
    return f"{size} B"


def row_text(row: Row) -> str:
    """Return a line of the table."""
    times = f"{row.seconds * 1e6:11.1f}{row.least * 1e6:11.1f}"
    widths = f"{row.algorithm_bandwidth / 1e9:10.3f}{row.bus_bandwidth / 1e9:10.3f}"
    return f"{row.call:22}{size_text(row.size):>10}{times}{widths}{row.calls:8}"


def constants_text(constants: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Return the lines of the second table."""
    yield f"{'call':22}{'alpha µs':>11}{'1/beta GB/s':>13}{'error':>8}"
    for call, found in constants.items():
        beta = found["beta"]
        width = f"{1e-9 / beta:13.3f}" if beta else f"{'-':>13}"
        doubt = "  do not use: noise" if found["error"] > DOUBTFUL else ""
        yield f"{call:22}{found['alpha'] * 1e6:11.1f}{width}{found['error']:8.0%}{doubt}"


def conditions_text(conditions: dict[str, Any]) -> str:
    """Return one line on what was measured where."""
    return ", ".join(f"{name} {value}" for name, value in conditions.items())


def as_json(
    conditions: dict[str, Any], rows: Sequence[Row], constants: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return all of it, in seconds and bytes."""
    return {
        "conditions": conditions,
        "units": {"size": "bytes", "seconds": "s", "alpha": "s", "beta": "s/byte"},
        "rows": [row._asdict() for row in rows],
        "constants": constants,
    }

"""The command line of a benchmark, and medians and ratios as cells of Markdown tables."""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch

MIB = 2**20
Figure = TypeVar("Figure")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that a module's first line describes; the profiler's own log is off."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    return argparse.ArgumentParser(description=(doc or "").splitlines()[0])


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table."""
    return "\n".join([head(*columns), *(row(*cells) for cells in rows)])


def head(*columns: str) -> str:
    """Return a table's head."""
    return f"{row(*columns)}\n{row(*['---'] * len(columns))}"


def row(*cells: object) -> str:
    """Return a table's row."""
    return f"| {' | '.join(map(str, cells))} |"


def largest(ranks: Iterable[Sequence[Figure]], value: Callable[[Figure], float]) -> list[float]:
    """Return the largest figure over the ranks, for each repeat.

    Args:
        ranks: Measurements of each rank by repeat.
        value: Returns the figure of a measurement.
    """
    return [max(map(value, repeat)) for repeat in zip(*ranks, strict=True)]


def ratios(ours: Iterable[float], theirs: Iterable[float]) -> list[float]:
    """Return the ratio of each repeat."""
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def quartiles(figures: Sequence[float]) -> list[float]:
    """Return the three quartiles; a single figure is returned three times."""
    if len(figures) == 1:
        return [*figures] * 3
    return statistics.quantiles(figures, n=4, method="inclusive")


def spread(figures: Sequence[float], digits: int = 3) -> str:
    """Return the median as text, with the quartiles if there are several figures."""
    low, middle, high = (f"{each:.{digits}f}" for each in quartiles(figures))
    return middle if len(figures) == 1 else f"{middle} ({low}-{high})"


def ratio(ours: Iterable[float], theirs: Iterable[float], digits: int = 3) -> str:
    """Return the median and quartiles of the repeats' ratios as text."""
    return spread(ratios(ours, theirs), digits)


def machine() -> str:
    """Return a description of the machine."""
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    return f"torch {torch.__version__}, {os.cpu_count()} cores, load before {load}"


def publish(lines: Iterator[str], file: Path | None) -> None:
    """Print lines as they come, and also to a file if one is given."""
    out = file.open("w") if file else None
    for line in lines:
        print(line, flush=True)
        if out:
            print(line, file=out, flush=True)

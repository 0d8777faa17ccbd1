"""Published runs and their predictions, as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .machines import GIB, MACHINES
from .predicted import predicted_gib, predicted_seconds
from .rows import Row

HEAD = (
    "| model | heads | ranks | dp x pp x cp x tp | rows | step, s | planned | error "
    "| GiB | planned | error |"
)
RULE = "| --- |" + " ---: |" * 2 + " --- |" + " ---: |" * 7


class Errors(NamedTuple):
    """Errors of predictions, relative to the measurements.

    Attributes:
        rows: Number of rows.
        mean: Mean absolute error.
        most: Largest absolute error.
    """

    rows: int
    mean: float
    most: float


class Compared(NamedTuple):
    """A run and its predictions; 0 means not measured."""

    row: Row
    seconds: float
    gib: float

    @property
    def time_error(self) -> float:
        """Relative error of the step time."""
        return self.seconds / self.row.seconds - 1

    @property
    def memory_error(self) -> float:
        """Relative error of the fullest rank's memory."""
        return self.gib / self.row.gib - 1


def compared(rows: Iterable[Row]) -> list[Compared]:
    """Return runs with predictions of their measured figures."""
    return [
        Compared(
            row,
            predicted_seconds(row) if row.seconds else 0.0,
            predicted_gib(row) if row.gib or row.full else 0.0,
        )
        for row in rows
    ]


def time_errors(found: Iterable[Compared]) -> Errors | None:
    """Return the errors of step times; None if none was measured."""
    return _errors([each.time_error for each in found if each.row.seconds])


def memory_errors(found: Iterable[Compared]) -> Errors | None:
    """Return the errors of memory; None if none was measured."""
    return _errors([each.memory_error for each in found if each.row.gib])


def _errors(off: Sequence[float]) -> Errors | None:
    if not off:
        return None
    sizes = [abs(each) for each in off]
    return Errors(len(sizes), sum(sizes) / len(sizes), max(sizes))


def lines(found: Iterable[Compared]) -> Iterator[str]:
    """Yield a table row for each run."""
    for row, seconds, gib in found:
        layout, grid = row.layout, row.layout.grid
        sort = ", selective" if row.program.attention == "selective" else ""
        name = f"{row.sizes.name}{sort}{f', {row.note}' if row.note else ''}"
        cells = [
            name, f"{row.sizes.heads}", f"{grid.world_size:,}",
            f"{grid.dp} x {grid.pp} x {grid.cp} x {grid.tp}", f"{layout.micro_rows}",
            *_pair(row.seconds, seconds, 2), *_pair(row.gib, gib, 1, full=row.full),
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def _pair(measured: float, planned: float, digits: int, *, full: bool = False) -> list[str]:
    if full and planned:
        return ["OOM", f"{planned:.{digits}f}", ""]
    if not measured:
        return ["", "", ""]
    whole = f"{measured:.{digits}f}" if digits > 1 else f"{measured:g}"
    return [whole, f"{planned:.{digits}f}", f"{planned / measured - 1:+.1%}"]


def summary(tables: Mapping[str, Sequence[Compared]]) -> Iterator[str]:
    """Yield a table of mean and largest errors, a row for each table of runs."""
    yield "| table | rows | time, mean | largest | rows | memory, mean | largest |"
    yield "| --- |" + " ---: |" * 6
    for name, found in tables.items():
        cells = [name]
        for errors in (time_errors(found), memory_errors(found)):
            some = errors and [str(errors.rows), f"{errors.mean:.1%}", f"{errors.most:.1%}"]
            cells += some or ["", "", ""]
        yield f"| {' | '.join(cells)} |"


def constants() -> Iterator[str]:
    """Yield a table of the machines' figures."""
    yield "| machine | NVLink, GB/s | between nodes, GB/s | products | µs | GiB |"
    yield "| --- |" + " ---: |" * 5
    for name, machine in MACHINES.items():
        own = machine.constants
        kept = f"{own.reserved / GIB:.1f}" if own.reserved else ""
        yield (
            f"| {name} | {machine.inside / 1e9:g} | {machine.between / 1e9:g} "
            f"| {own.products:.2f} | {own.overhead * 1e6:.0f} | {kept} |"
        )

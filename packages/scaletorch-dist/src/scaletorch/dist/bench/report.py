"""A whole run on one rank: join, measure, print, write, leave."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

import torch.distributed as c10d

from ..devices import default_backend
from ..startup.initialize import cleanup_dist, init_dist
from ..world.info import get_rank
from .measure import Row
from .plot import draw
from .run import Options, run
from .table import HEAD, conditions_text, constants_text, row_text


def report(options: Options, json_path: str | None = None, plot_path: str | None = None) -> None:
    """Measure on this rank; global rank 0 prints tables and writes files.

    Args:
        options: The same on every rank.
        json_path: File to write rows and constants to; None for none.
        plot_path: File to draw a picture into; None for none.
    """
    joined = not c10d.is_initialized()
    if joined:
        init_dist(backend=options.backend or default_backend())
    try:
        first = get_rank() == 0
        if first:
            _say([HEAD])
        result = run(options, _say_row if first else _ignore)
    finally:
        if joined:
            cleanup_dist()
    if not first:
        return
    conditions = conditions_text(result["conditions"])
    _say(["", conditions, "", *constants_text(result["constants"])])
    if json_path:
        with open(json_path, "w") as file:
            json.dump(result, file, indent=1)
    if plot_path:
        draw([Row(**row) for row in result["rows"]], conditions, plot_path)


def _say(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def _say_row(row: Row) -> None:
    _say([row_text(row)])


def _ignore(row: Row) -> None:
    pass

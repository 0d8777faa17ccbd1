"""Schedules as CSV, which a spreadsheet opens."""

from __future__ import annotations

import csv
import io
import re

from ....dist.errors import InvalidArgumentError
from .schedule import KINDS, Action, Schedule

_NUMBER = "-?[0-9]{1,9}"
_ACTION = re.compile(rf"([A-Za-z]+)({_NUMBER})(?:\.({_NUMBER}))?")
_STAGES = re.compile(rf" *{_NUMBER}( +{_NUMBER})* *")


def to_csv(schedule: Schedule) -> str:
    """Write a line for each rank: its stages, as `0 7`, then its actions, as `F3` or `B0.1`.

    The schedule's name is not in it.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for rank, stages in enumerate(schedule.stages):
        writer.writerow([" ".join(map(str, stages)), *map(str, schedule.ranks[rank])])
    return text.getvalue()


def from_csv(text: str, name: str = "csv") -> Schedule:
    """Read the text of `to_csv`; empty cells and lines are skipped, so that bubbles may be drawn.

    Args:
        text: The file's text. The step has as many micro-batches as its actions name.
        name: Name of the schedule.

    Raises:
        InvalidArgumentError: A cell that is not of the rank's stages or actions, with its row and
            column, both from 1; no actions at all; or stages that are not each there once.
    """
    lines = enumerate(csv.reader(text.splitlines()), 1)
    rows = [(row, cells) for row, cells in lines if any(map(str.strip, cells))]
    stages = [_read_stages(cells[0], row) for row, cells in rows]
    _require_each_stage_once(stages)
    ranks = tuple(
        tuple(
            _read_action(cell.strip(), f"row {row}, column {column}", len(own))
            for column, cell in enumerate(cells[1:], 2)
            if cell.strip()
        )
        for (row, cells), own in zip(rows, stages, strict=True)
    )
    if not any(ranks):
        raise InvalidArgumentError("a schedule needs actions, got none in any row")
    num_micro_batches = 1 + max(action.micro_batch for actions in ranks for action in actions)
    return Schedule(name, num_micro_batches, tuple(map(tuple, stages)), ranks)


def _read_stages(cell: str, row: int) -> list[int]:
    if not _STAGES.fullmatch(cell):
        message = f"expected the rank's stages, such as 0 or 0 7, got {cell!r}"
        raise InvalidArgumentError(f"row {row}, column 1: {message}")
    return [int(stage) for stage in cell.split()]


def _read_action(cell: str, where: str, num_chunks: int) -> Action:
    match = _ACTION.fullmatch(cell)
    if match is None:
        message = f"expected an action, such as F3 or, of chunk 1, B0.1, got {cell!r}"
        raise InvalidArgumentError(f"{where}: {message}")
    action = Action(match[1], int(match[2]), int(match[3] or 0))
    problem = _problem(action, num_chunks)
    if problem:
        raise InvalidArgumentError(f"{where}: {cell} {problem}")
    return action


def _problem(action: Action, num_chunks: int) -> str:
    if action.kind not in KINDS:
        return f"is of no known kind; the kinds are {', '.join(KINDS)}"
    if action.micro_batch < 0 or action.chunk < 0:
        return "has a negative number; micro-batches and chunks count from 0"
    if action.chunk >= num_chunks:
        return f"is of a chunk that the rank does not have; its last is {num_chunks - 1}"
    return ""


def _require_each_stage_once(stages: list[list[int]]) -> None:
    found = sorted(stage for of_rank in stages for stage in of_rank)
    if not stages or not all(stages) or found != list(range(len(found))):
        raise InvalidArgumentError(
            "every rank needs at least one stage, and all together stages 0, 1, 2 and so on, "
            f"each once; got {stages}"
        )

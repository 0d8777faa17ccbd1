"""Schedules as text: CSV to write by hand in a spreadsheet, JSON to keep everything."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable
from itertools import accumulate, chain
from typing import Any

from ....dist.errors import InvalidArgumentError
from .schedule import KINDS, Action, Schedule

_NUMBER = "-?[0-9]{1,9}"
_ACTION = re.compile(rf"([A-Za-z]+)({_NUMBER})(?:\.({_NUMBER}))?")
_STAGES = re.compile(rf" *{_NUMBER}( +{_NUMBER})* *")
_FIELDS = {"name": str, "num_micro_batches": int, "stages": list, "ranks": list}


def to_csv(schedule: Schedule) -> str:
    """Write a line for each rank: its stages, as `0 7`, then its actions, as `F3` or `B0.1`.

    Two that may run together are in one cell, as `F3+B0.1`.
    The schedule's name is not in it.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for rank, stages in enumerate(schedule.stages):
        writer.writerow([" ".join(map(str, stages)), *schedule.texts(rank)])
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
    ranks, pairs = _joined(
        [
            _read_cell(cell.strip(), f"row {row}, column {column}", len(own))
            for column, cell in enumerate(cells[1:], 2)
            if cell.strip()
        ]
        for (row, cells), own in zip(rows, stages, strict=True)
    )
    if not any(ranks):
        raise InvalidArgumentError("a schedule needs actions, got none in any row")
    num_micro_batches = 1 + max(action.micro_batch for actions in ranks for action in actions)
    return Schedule(name, num_micro_batches, tuple(map(tuple, stages)), ranks, pairs)


def to_json(schedule: Schedule) -> str:
    """Write an object with the fields of `Schedule`, one line for each rank's actions.

    Pairs are among the actions, as `to_csv` writes them.
    """
    texts = map(schedule.texts, range(schedule.num_ranks))
    ranks = ",\n    ".join(json.dumps(each) for each in texts)
    return (
        "{\n"
        f'  "name": {json.dumps(schedule.name)},\n'
        f'  "num_micro_batches": {schedule.num_micro_batches},\n'
        f'  "stages": {json.dumps(schedule.stages)},\n'
        f'  "ranks": [\n    {ranks}\n  ]\n'
        "}\n"
    )


def from_json(text: str) -> Schedule:
    """Read the text of `to_json`.

    Raises:
        InvalidArgumentError: Not such an object; an action that the rank cannot have, with its
            place in the lists, from 0; or stages that are not each there once.
    """
    fields = _read_fields(text)
    stages, ranks, last = fields["stages"], fields["ranks"], fields["num_micro_batches"] - 1
    if len(stages) != len(ranks) or not all(isinstance(item, list) for item in stages + ranks):
        message = "'stages' and 'ranks' must hold one list for each rank, and as many of them"
        raise InvalidArgumentError(f"{message}; got {len(stages)} and {len(ranks)} items")
    _require_each_stage_once(stages)
    read, pairs = _joined(
        [
            _read_cell(cell, f"ranks[{rank}][{index}]", len(stages[rank]), last)
            for index, cell in enumerate(cells)
        ]
        for rank, cells in enumerate(ranks)
    )
    return Schedule(fields["name"], last + 1, tuple(map(tuple, stages)), read, pairs)


def _read_stages(cell: str, row: int) -> list[int]:
    if not _STAGES.fullmatch(cell):
        message = f"expected the rank's stages, such as 0 or 0 7, got {cell!r}"
        raise InvalidArgumentError(f"row {row}, column 1: {message}")
    return [int(stage) for stage in cell.split()]


def _read_fields(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidArgumentError(f"a schedule's JSON does not parse: {error}") from error
    if not isinstance(fields, dict) or set(fields) != set(_FIELDS):
        found = list(fields) if isinstance(fields, dict) else type(fields).__name__
        raise InvalidArgumentError(f"expected an object with {list(_FIELDS)}, got {found}")
    for field, expected in _FIELDS.items():
        if type(fields[field]) is not expected:  # a bool is no number of micro-batches
            found = f"{expected.__name__}, got {fields[field]!r:.40}"
            raise InvalidArgumentError(f"{field!r} must be of type {found}")
    if fields["num_micro_batches"] < 1:
        message = f"'num_micro_batches' must be at least 1, got {fields['num_micro_batches']}"
        raise InvalidArgumentError(message)
    return fields


def _joined(
    ranks: Iterable[list[list[Action]]],
) -> tuple[tuple[tuple[Action, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return each rank's actions, and the places of those that have another one in their cell."""
    actions, pairs = [], []
    for cells in ranks:
        ends = accumulate(map(len, cells))
        pairs.append(tuple(e - 2 for e, cell in zip(ends, cells, strict=True) if len(cell) > 1))
        actions.append(tuple(chain.from_iterable(cells)))
    return tuple(actions), tuple(pairs) if any(pairs) else ()


def _read_cell(cell: object, where: str, num_chunks: int, last: int | None = None) -> list[Action]:
    """Read one action, or two that may run together."""
    parts = cell.split("+", 1) if isinstance(cell, str) else [cell]
    return [_read_action(part, where, num_chunks, last) for part in parts]


def _read_action(cell: object, where: str, num_chunks: int, last: int | None = None) -> Action:
    match = _ACTION.fullmatch(cell) if isinstance(cell, str) else None
    if match is None:
        message = f"expected an action, such as F3 or, of chunk 1, B0.1, got {cell!r}"
        raise InvalidArgumentError(f"{where}: {message}")
    action = Action(match[1], int(match[2]), int(match[3] or 0))
    problem = _problem(action, num_chunks, last)
    if problem:
        raise InvalidArgumentError(f"{where}: {cell} {problem}")
    return action


def _problem(action: Action, num_chunks: int, last: int | None) -> str:
    if action.kind not in KINDS:
        return f"is of no known kind; the kinds are {', '.join(KINDS)}"
    if action.micro_batch < 0 or action.chunk < 0:
        return "has a negative number; micro-batches and chunks count from 0"
    if action.chunk >= num_chunks:
        return f"is of a chunk that the rank does not have; its last is {num_chunks - 1}"
    if last is not None and action.micro_batch > last:
        return f"is of a micro-batch that the step does not have; its last is {last}"
    return ""


def _require_each_stage_once(stages: list[list[Any]]) -> None:
    found = [stage for of_rank in stages for stage in of_rank]
    whole = all(type(stage) is int for stage in found)
    if not (whole and stages and all(stages) and set(found) == set(range(len(found)))):
        raise InvalidArgumentError(
            "every rank needs at least one stage, and all together stages 0, 1, 2 and so on, "
            f"each once; got {stages}"
        )

"""The file with the last verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ..packages import ROOT
from .verdicts import Verdict

FILE = ROOT / "docs" / "families.json"


class Record(NamedTuple):
    """Recorded verdicts.

    Attributes:
        version: Version of transformers.
        verdicts: By family and axis.
    """

    version: str
    verdicts: dict[str, dict[str, Verdict]]


def read(file: Path = FILE) -> Record:
    """Return the record in a file; an empty one if there is no file."""
    plain = _plain(file)
    verdicts = {
        name: {axis: Verdict(**cell) for axis, cell in cells.items()}
        for name, cells in plain["families"].items()
    }
    return Record(plain["transformers"], verdicts)


def keep(file: Path, version: str, name: str, axis: str, verdict: Verdict) -> None:
    """Add or replace one verdict in the file."""
    plain = _plain(file)
    plain["transformers"] = version
    cells = plain["families"].setdefault(name, {})
    cells[axis] = verdict.plain()
    plain["families"] = dict(sorted(plain["families"].items()))
    temporary = file.with_suffix(".new")
    temporary.write_text(json.dumps(plain, indent=1, ensure_ascii=False) + "\n")
    temporary.replace(file)


def _plain(file: Path) -> dict[str, Any]:
    empty: dict[str, Any] = {"transformers": "", "families": {}}
    return json.loads(file.read_text()) if file.exists() else empty

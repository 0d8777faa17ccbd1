"""What was found of each family, in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from ...packages import ROOT
from .verdicts import Family

FILE = ROOT / "docs" / "families_own_tp.json"


def read(file: Path = FILE) -> dict[str, Any]:
    """Return the versions under 'torch' and 'transformers', and 'families' by name."""
    plain = _plain(file)
    return {**plain, "families": {n: Family.of(f) for n, f in plain["families"].items()}}


def keep(file: Path, name: str, found: Family) -> None:
    """Write what was found of one family, beside the others."""
    plain = _plain(file)
    plain["torch"] = torch.__version__.partition("+")[0]
    plain["transformers"] = transformers.__version__
    plain["families"][name] = found.plain()
    plain["families"] = dict(sorted(plain["families"].items()))
    temporary = file.with_suffix(".new")
    temporary.write_text(json.dumps(plain, indent=1, ensure_ascii=False) + "\n")
    temporary.replace(file)


def _plain(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"families": {}}
    return found

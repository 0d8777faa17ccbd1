"""The document of faults lists those that there are."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "packages/scaletorch/tests"))

from mutants import MUTANTS

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "mutants.md"


def test_every_mutant_is_in_the_table_and_none_survives():
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")][2:]
    cells = {row.split(" | ")[0].removeprefix("| "): row.split(" | ")[1:3] for row in rows}
    assert cells == {name: [each.fault, str(each.case)] for name, each in MUTANTS.items()}
    assert not any("survives" in row for row in rows)

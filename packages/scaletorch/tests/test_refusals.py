"""Each row of "What is refused" on every layout: right, or refused in words that match.

Half of the rows are tried on one layout each day. `pytest -s` shows for each model whether
it trains right (R) or is refused (X).
"""

import re
import sys
from itertools import product
from pathlib import Path

import pytest
from refusals.cells import cells, names
from refusals.layouts import LAYOUTS
from refusals.rows import CASES
from sweeps import today

from scaletorch.dist.testing import run_ranks

GUIDE = Path(__file__).parents[3] / "docs" / "expectations.md"


def judge(case, features, of_ranks):
    """Return R or X, and what is wrong with what ranks were told, if anything."""
    kinds = {kind for kind, _ in of_ranks}
    odd = [text for kind, text in of_ranks if kind not in ("right", "refused")]
    shown = (odd or [text for _, text in of_ranks])[0]
    if kinds == {"right"}:
        return "R", f"trains ({shown})" if case.refused(features) else None
    if kinds != {"refused"}:
        return "?", f"{sorted(kinds)}: {shown}"
    if not case.refused(features):
        return "X", f"refused: {shown}"
    said = [text for _, text in of_ranks if not re.search(case.words, text, re.DOTALL)]
    return "X", f"other words: {said[0]}" if said else None


def show(lines):
    """Write what `pytest -s` shows."""
    sys.stdout.write("\n".join(lines) + "\n")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("layout", "half"), today([*product(LAYOUTS, range(2))], 2 * len(LAYOUTS)), ids=str
)
def test_every_row_on_a_layout(layout, half):
    mistakes, lines, chosen = [], [], names()[half::2]
    found = run_ranks(cells, layout.ranks, chosen, layout, timeout=300)
    for (row, name), told in zip(chosen, zip(*found, strict=True), strict=True):
        letter, mistake = judge(CASES[row][name], layout.features, told)
        lines.append(f"{letter} {name}")
        if mistake:
            mistakes.append(f"{name}: {mistake}")
    show(["", str(layout), *lines])
    assert not mistakes, "\n".join(mistakes)


def test_every_row_of_the_guide_has_models():
    table = GUIDE.read_text().split("## What is refused")[1].split("\n\n")[2]
    rows = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert [row for row in rows if row and not any(row.startswith(known) for known in CASES)] == []
    assert len([row for row in rows if row]) == len(CASES)

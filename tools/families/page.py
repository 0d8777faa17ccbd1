"""The table of families as a page, in English and in Chinese, from the recorded verdicts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..packages import ROOT
from .axes import AXES
from .verdicts import ALONE, BOUND, DIFFERS, FAULTS, HANGS, NONE, OBSCURE, REFUSED, SAME, Verdict

PAGES = {"en": ROOT / "docs" / "families.md", "zh": ROOT / "docs" / "zh" / "families.md"}
WORDS = (SAME, REFUSED, ALONE, NONE, *FAULTS)
_QUOTED = re.compile(r"'[^']*'")
_CLASS = re.compile(r"\b\w+(?:For\w+|HeadModel)\b|\b(?:[A-Z][a-z0-9]*){2,}\w*\b")
_NUMBER = re.compile(r"\b\d[\d,.]*\b")

Verdicts = Mapping[str, Mapping[str, Verdict]]


class Reason(NamedTuple):
    """A reason for refused or failed cells: the words of the first one, and the number of cells."""

    mark: str
    words: str
    cells: int


def reasons(verdicts: Verdicts) -> dict[str, Reason]:
    """Return the reasons by their common words, most frequent first."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for cells in verdicts.values():
        for verdict in cells.values():
            if verdict.word not in (SAME, NONE):
                first.setdefault(alike(verdict), verdict.words)
                counts[alike(verdict)] += 1
    letters: Counter[str] = Counter()
    found = {}
    for key, count in counts.most_common():
        letter = _letter(key.partition(":")[0])
        letters[letter] += 1
        found[key] = Reason(f"{letter}{letters[letter]}", first[key], count)
    return found


def alike(verdict: Verdict) -> str:
    """Return the key of equal reasons: a verdict's text without names and numbers."""
    words = _QUOTED.sub("'...'", verdict.words)
    return f"{verdict.word}: {_NUMBER.sub('N', _CLASS.sub('Class', words))}"


def _letter(word: str) -> str:
    return {REFUSED: "r", ALONE: "f", OBSCURE: "O", DIFFERS: "D", HANGS: "H"}[word]


def render(verdicts: Verdicts, version: str, text: Mapping[str, str]) -> str:
    """Return a page.

    Args:
        verdicts: Recorded verdicts.
        version: Version of transformers.
        text: The page in one language (`page.LANGUAGE.md`), and heads of a table.
    """
    known = reasons(verdicts)
    counted = Counter((axis, v.word) for cells in verdicts.values() for axis, v in cells.items())
    words = [word for word in WORDS if any(counted[axis, word] for axis in AXES)]
    summary = [[axis, *(str(counted[axis, word]) for word in words)] for axis in AXES]
    table = [
        [name, *(_cell(cells.get(a), known) for a in AXES)] for name, cells in verdicts.items()
    ]
    why = [[r.mark, str(r.cells), r.words.replace("|", "\\|")] for r in known.values()]
    filled = {
        "version": version,
        "families": str(len(verdicts)),
        "bound": f"{BOUND:.0e}",
        "summary": _table(["", *words], summary),
        "table": _table(["", *AXES], table),
        "reasons": _table(["", text["cells"], text["words"]], why),
    }
    return text["page"].format(**filled)


def _cell(verdict: Verdict | None, known: Mapping[str, Reason]) -> str:
    if verdict is None:
        return "?"
    if verdict.word == SAME:
        return f"{verdict.error:.0e}"
    return "-" if verdict.word == NONE else known[alike(verdict)].mark


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def pages(version: str, verdicts: Verdicts) -> dict[Path, str]:
    """Return the text of each page."""
    found = {}
    for language, path in PAGES.items():
        source = (Path(__file__).parent / f"page.{language}.md").read_text()
        title, _, text = source.partition("\n")
        cells, words = title.split(" | ")
        found[path] = render(verdicts, version, {"cells": cells, "words": words, "page": text})
    return found


def write(version: str, verdicts: Verdicts) -> None:
    """Write the pages."""
    for path, text in pages(version, verdicts).items():
        path.write_text(text)

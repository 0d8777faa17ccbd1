"""What was found as a page, in English and in Chinese."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...packages import ROOT
from ..verdicts import BOUND
from .verdicts import ALONE, NO_PLAN, RAISES, RIGHT, UNJUDGED, WRONG, Family

PAGES = {
    "en": ROOT / "docs" / "families_own_tp.md",
    "zh": ROOT / "docs" / "zh" / "families_own_tp.md",
}
DTYPES = ("float64", "float32")


def pages(record: Mapping[str, Any]) -> dict[Path, str]:
    """Return the text of each page."""
    filled = _filled(record)
    sources = {path: Path(__file__).parent / f"page.{lang}.md" for lang, path in PAGES.items()}
    return {path: source.read_text().format(**filled) for path, source in sources.items()}


def write(record: Mapping[str, Any]) -> None:
    """Write the pages."""
    for path, text in pages(record).items():
        path.write_text(text)


def _filled(record: Mapping[str, Any]) -> dict[str, str]:
    families: Mapping[str, Family] = record["families"]
    tried = {n: f for n, f in families.items() if f.by_dtype}
    right = sum(f.is_right for f in tried.values())
    failed = [[n, f.word, f.words] for n, f in families.items() if f.word in (RAISES, ALONE)]
    failed += [
        [f"{n}, {dtype}", each.word, each.words]
        for n, f in tried.items()
        for dtype, each in f.by_dtype.items()
        if each.word in (UNJUDGED, RAISES)
    ]
    return {
        "torch": record["torch"],
        "transformers": record["transformers"],
        "families": str(len(families)),
        "tried": str(len(tried)),
        "right": str(right),
        "wrong": str(len(tried) - right),
        "alarms": str(sum(f.false_alarm for f in tried.values())),
        "missed": str(sum(f.missed for f in tried.values())),
        "bound": f"{BOUND:.0e}",
        "sums": _sums(tried),
        "reported": "\n\n".join(_reported(tried)),
        "table": _rows([n, f"{f.cut:.0%}", f"{f.error:.0e}", *_words(f)] for n, f in tried.items()),
        "failed": _rows(failed),
        "plans": str(sum(f.word == NO_PLAN for f in families.values())),
        "no_plan": ", ".join(n for n, f in families.items() if f.word == NO_PLAN),
    }


def _words(family: Family) -> list[str]:
    words = (family.by_dtype[dtype].word for dtype in DTYPES)
    return [f"**{word}**" if word != RIGHT else word for word in words]


def _sums(tried: Mapping[str, Family]) -> str:
    counted = Counter((d, each.word) for f in tried.values() for d, each in f.by_dtype.items())
    words = [w for w in (RIGHT, WRONG, UNJUDGED, RAISES) if any(counted[d, w] for d in DTYPES)]
    return _rows([word, *(str(counted[dtype, word]) for dtype in DTYPES)] for word in words)


def _reported(tried: Mapping[str, Family]) -> Iterable[str]:
    """Yield a paragraph for each family that is reported wrong: whole tensors, and the report."""
    for name, family in tried.items():
        if all(each.word != WRONG for each in family.by_dtype.values()):
            continue
        apart = ", ".join(
            f"{kind} {error:.1e}{f' ({where})' if where not in ('', kind) else ''}"
            for kind, (error, where) in family.apart.items()
        )
        lines = [
            "\n".join([f"{dtype}: {each.words}", f"  {each.born}", *(f"  {h}" for h in each.how)])
            for dtype, each in family.by_dtype.items()
            if each.word == WRONG
        ]
        yield f"`{name}`:\n\n```text\nwhole tensors: {apart}\n" + "\n".join(lines) + "\n```"


def _rows(rows: Iterable[Iterable[str]]) -> str:
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in escaped)

"""The figure of a hunt, and its survivors without a known reason."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .hunt import sentence
from .reasons import equivalents


def show(results: list[dict[str, Any]], commit: str, seed: int) -> str:
    """Return the figure, and a line for each survivor without a reason."""
    fates = latest(results)
    reasons = equivalents(commit, seed)
    counts = Counter(_fate(each, reasons) for each in fates)
    judged = len(fates) - counts["equivalent"]
    share = 100 * counts["caught"] / judged if judged else 0.0
    rows = [sentence(each) for each in fates if _fate(each, reasons) in ("survived", "not run")]
    rows += [", ".join(f"{name} {number}" for name, number in sorted(counts.items()))]
    rows += [f"{counts['caught']} of {judged} that are not equivalent are caught: {share:.1f} %"]
    return "\n".join(rows)


def latest(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one result for each mutant: a catch if there is one, else the last result."""
    fates: dict[int, dict[str, Any]] = {}
    for each in results:
        if fates.get(each["mutant"], {}).get("verdict") != "caught":
            fates[each["mutant"]] = each
    return [fates[number] for number in sorted(fates)]


def _fate(result: dict[str, Any], reasons: dict[int, str]) -> str:
    caught = result["verdict"] == "caught"
    return "equivalent" if result["mutant"] in reasons and not caught else result["verdict"]

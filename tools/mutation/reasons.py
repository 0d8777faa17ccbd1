"""Equivalent mutants, which no test can notice, with reasons that people wrote."""

from __future__ import annotations

import json
from pathlib import Path

REASONS = Path(__file__).with_name("equivalents.json")


def equivalents(commit: str, seed: int) -> dict[int, str]:
    """Return mutant number → reason for the equivalent mutants of one hunt."""
    known = json.loads(REASONS.read_text())
    for hunt in known:
        if commit.startswith(hunt["commit"]) and hunt["seed"] == seed:
            return {each["mutant"]: each["why"] for each in hunt["equivalent"]}
    return {}

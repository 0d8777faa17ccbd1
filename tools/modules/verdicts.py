"""The verdict on a module on a layout: one word, and the reason."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from ..families.verdicts import HANGS, OBSCURE, Verdict, first_sentence
from .cell import Told

RIGHT, UNSEEN = "right", "right, unrehearsed"
REFUSED, WARNED, FOUND = "refused", "wrong, warned", "found by the rehearsal"
SILENT, FALSE = "WRONG IN SILENCE", "FALSE REFUSAL"
FAULTS = (SILENT, FALSE, OBSCURE, HANGS)
_NAMES = (
    (r"\(dp\d.*?\)|dp\d+ pp\d+ cp\d+ tp\d+", ""),  # coordinates of ranks
    (r"'[^']*'|\"[^\"]*\"|\[[^]]*\]", "_"),  # quoted text, shapes
    (r"\b(\w+\.)+\w+(\(\))?", "_"),  # dotted names
    (r"\b\w*[A-Z_0-9]\w*\b", "_"),  # classes, numbers, names with underscores
    (r"(_\W*)+_", "_ "),
)


def of_ranks(told: Sequence[Told]) -> Verdict:
    """Return the verdict if every rank returned."""
    kinds = {each.kind for each in told}
    refusals = [each for each in told if each.kind in ("refused", "rehearsal")]
    if refusals:
        # Ranks that heard of it from others raise MismatchError.
        own = [each for each in refusals if not each.words.startswith("MismatchError")]
        words = (own or refusals)[0].words
        if not kinds <= {"refused", "rehearsal"}:
            return Verdict(OBSCURE, words=f"some ranks only: {first_sentence(words)}")
        return Verdict(FOUND if "rehearsal" in kinds else REFUSED, words=words)
    worst = max(told, key=lambda each: (not math.isfinite(each.error), each.error))
    warned = next((each.warned for each in told if each.warned), ())
    if kinds == {"right"}:
        unseen = [text for text in warned if "rehearsed" in text or "not compared" in text]
        return Verdict(UNSEEN if unseen else RIGHT, worst.error, (unseen or [worst.words])[0])
    words = "; ".join((worst.words, *(f"warned: {text}" for text in warned)))
    return Verdict(WARNED if warned else SILENT, worst.error, words)


def after(rehearsal: Verdict, without: Verdict) -> Verdict:
    """Return the verdict on a rehearsal's refusal, given a run without the rehearsal."""
    if without.word in (RIGHT, UNSEEN):
        return replace(rehearsal, word=FALSE)
    return rehearsal


def reason(words: str) -> str:
    """Return the first words of a refusal, without names and numbers."""
    kind, _, text = words.partition(": ")
    for pattern, put in _NAMES:
        text = re.sub(pattern, put, text)
    said = re.sub(r"^(\W*rank\W*_?\W*)+", "", " ".join(text.split()))
    return f"{kind}: {' '.join(said.split()[:14])}"

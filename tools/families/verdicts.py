"""The verdict on a cell: one word, and an error or a message."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from scaletorch.dist.errors import RankFailedError

if TYPE_CHECKING:
    from .ranks import Said

BOUND = 1e-9

SAME, REFUSED, ALONE = "as one process", "refused", "one process fails"
OBSCURE, DIFFERS, HANGS, NONE = "OBSCURE", "DIFFERS", "HANGS", "no experts"
FAULTS = (OBSCURE, DIFFERS, HANGS)
_RANK = re.compile(r"\b(?:rank \d+ )?\(?dp\d+ pp\d+ cp\d+ tp\d+(?: edp\d+ ep\d+ etp\d+)?\)?:? ?")
_HEARD = re.compile(r"^failed in .*?Error: ")  # an error that another pipeline rank raised
_LONGEST = 320


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a cell.

    Attributes:
        word: One of the words above.
        error: Largest relative error of loss, gradients and weights, if it trained.
        words: Message, or name of the tensor with the largest error.
    """

    word: str
    error: float | None = None
    words: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


def of_ranks(said: Sequence[Said]) -> Verdict:
    """Return the verdict if every rank returned."""
    refused = sorted(said, key=lambda each: ("refused", "heard", "trained").index(each[0]))
    if refused[0][0] != "trained":
        if len({each[0] == "trained" for each in said}) > 1:
            return Verdict(OBSCURE, words=f"some ranks only: {first_sentence(refused[0][2])}")
        return Verdict(REFUSED, words=first_sentence(refused[0][2]))
    _, error, where = max(said, key=lambda each: each[1])
    if not math.isfinite(error):
        return Verdict(DIFFERS, words=f"{where}, which is missing or not finite")
    return Verdict(SAME if error < BOUND else DIFFERS, float(f"{error:.1e}"), where)


def of_failure(error: RankFailedError) -> Verdict:
    """Return the verdict if a rank did not return."""
    if not error.failures:
        return Verdict(HANGS, words=_innermost(str(error)))
    rank, text = next(iter(error.failures.items()))
    raised = error.exceptions.get(rank)
    last = text.rstrip().rpartition("\n")[2] if raised is None else described(raised)
    return Verdict(OBSCURE, words=f"{last[:_LONGEST]} [{_innermost(text)}]")


def described(error: BaseException) -> str:
    """Return the class of an error and its first line."""
    line = (str(error).strip() or " ").splitlines()[0]
    return f"{type(error).__name__}: {line}"[:_LONGEST]


def first_sentence(text: str) -> str:
    """Return a refusal's first sentence, without the coordinates of its rank.

    If it quotes an error of the model's own code, the quoted text is kept.
    """
    words = " ".join(_HEARD.sub("", _RANK.sub("", text)).split())
    sentence = re.split(r"(?<=[^.])[.;] |\.$", words)[0]
    return sentence if len(sentence) <= _LONGEST else f"{sentence[: _LONGEST - 3]}..."


def _innermost(trace: str) -> str:
    """Return the innermost file, line and function of a traceback."""
    found = re.findall(r'File "(?:.*/)?([^"/]+)", line (\d+),? in (\S+)', trace)
    return " ".join(found[-1]) if found else ""


def worse(found: Verdict, recorded: Verdict) -> bool:
    """Return whether a cell got worse: it no longer trains the same, or it is a new fault."""
    if recorded.word == SAME:
        return found.word != SAME
    return found.word in FAULTS and recorded.word not in FAULTS

"""Reports of a comparison, as text and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .comparison.births import Birth
from .comparison.judge import BAD, UNSEEN, Judged
from .keys import FINAL, Key, Kind

SHOWN = 3  # births and inputs that the text names


@dataclass(frozen=True, slots=True)
class Found:
    """The place where a fault begins, with an explanation.

    Attributes:
        birth: The wrong tensor, and the tensors that it was computed from.
        how: Sentences that describe the error, surest first.
    """

    birth: Birth
    how: list[str]

    def __str__(self) -> str:
        """Return the finding in a few lines."""
        own, birth = self.birth.judged, self.birth
        where = ", ".join(name or "the model itself" for name in birth.modules[:SHOWN])
        more = f" and {len(birth.modules) - SHOWN} more" if len(birth.modules) > SHOWN else ""
        came = f"in {birth.direction}"
        if birth.direction == Kind.START:
            came = "before the step, where weights are made, loaded or divided"
        lines = [
            f"{own.key}, step {own.key.step}: off by {_figure(own.error)}, and rounding explains "
            f"{_figure(own.bound)}",
            f"  born {came}" + (f": {where}{more}" if where else ""),
        ]
        if own.wrong:
            ranks = sorted({rank for rank, _ in own.wrong})
            micro_batches = sorted({number for _, number in own.wrong})
            lines.append(f"  on ranks {ranks}, in micro-batches {micro_batches}")
        elif own.why:
            lines.append(f"  {own.why}")
        lines += [f"  {sentence}" for sentence in self.how]
        if birth.inputs:
            worst = max(birth.inputs, key=lambda each: each.error)
            count = f"{len(birth.inputs)} right tensor{'s' * (len(birth.inputs) > 1)}"
            error = f"the largest error is {_figure(worst.error)}, in {worst.key}"
            lines.append(f"  it was computed from {count}; {error}")
        if birth.others:
            named = ", ".join(str(each.key) for each in birth.others[:SHOWN]) + _dots(birth.others)
            lines.append(f"  wrong in the same way, {len(birth.others)} more: {named}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of comparing two runs.

    Attributes:
        found: The places where faults begin, in the order of the computation; none if it is sound.
        judged: The verdict on each tensor.
        command: The command that repeats the comparison.
        notes: Further remarks, one a line.
    """

    found: list[Found]
    judged: Mapping[Key, Judged]
    command: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """True if every result of the training was compared and agrees up to rounding."""
        return not self.found and not self.unjudged

    @property
    def unjudged(self) -> list[str]:
        """The results of the training that were not compared, each with the reason."""
        results = [each for each in self.judged.values() if each.key.kind in FINAL]
        if not any(each.key.kind == Kind.GRADIENT for each in results):
            return ["no gradient was recorded: record a backward, and the model that it trains"]
        return [f"{each.key}: {each.why}" for each in results if each.state == UNSEEN]

    def count(self, state: str) -> int:
        """Return the number of tensors in a state: GOOD, BAD or UNSEEN."""
        return sum(each.state == state for each in self.judged.values())

    def __str__(self) -> str:
        """Return the findings, the summary, the notes and the command."""
        lines = [f"{number + 1}. {each}" for number, each in enumerate(self.found[:SHOWN])]
        if len(self.found) > SHOWN:
            lines.append(f"and {len(self.found) - SHOWN} more in the same step")
        if not self.found and (unjudged := self.unjudged):
            first = "; ".join(unjudged[:SHOWN]) + _dots(unjudged)
            lines = [f"not judged, {len(unjudged)} of the training's results: {first}"]
        return "\n".join([*lines, self.summary(), *self.notes, self.command]).rstrip()

    def summary(self) -> str:
        """Return one line with the numbers of tensors that were compared and that are wrong."""
        total, unseen = len(self.judged), self.count(UNSEEN)
        text = f"{total - unseen} tensors compared"
        if unseen:
            reason = next(e for e in self.judged.values() if e.state == UNSEEN)
            text += f", {unseen} not ({reason.key}: {reason.why}{', …' if unseen > 1 else ''})"
        if not self.found:
            text += f" ({len(self.unjudged)} results among them)" * bool(self.unjudged)
            return f"{text}: no result of the training differs by more than rounding explains"
        return f"{text}; {self.count(BAD)} are wrong: born wrong, or computed from a wrong one"

    def to_json(self) -> str:
        """Return everything as JSON; not-a-number and infinity as strings."""
        content = {
            "sound": self.sound,
            "unjudged": self.unjudged,
            "compared": len(self.judged) - self.count(UNSEEN),
            "wrong": self.count(BAD),
            "found": [_plain(each) for each in self.found],
            "unseen": {str(k): e.why for k, e in self.judged.items() if e.state == UNSEEN},
            "notes": self.notes,
            "command": self.command,
        }
        return json.dumps(content, indent=2, allow_nan=False) + "\n"


def _plain(found: Found) -> dict[str, Any]:
    own = found.birth.judged
    return {
        "tensor": str(own.key),
        **own.key._asdict(),
        "error": _number(own.error),
        "bound": _number(own.bound),
        "direction": found.birth.direction,
        "modules": found.birth.modules,
        "shards": [{"rank": rank, "micro_batch": number} for rank, number in own.wrong],
        "how": found.how,
        "inputs": [
            {"tensor": str(each.key), "error": _number(each.error), "bound": _number(each.bound)}
            for each in found.birth.inputs
        ],
        "others": [str(each.key) for each in found.birth.others],
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _figure(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "all of it"


def _dots(items: Sequence[Any]) -> str:
    return ", …" if len(items) > SHOWN else ""

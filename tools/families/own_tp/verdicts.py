"""What was found of a family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

RIGHT, WRONG, UNJUDGED, RAISES = "right", "wrong", "not judged", "raises"
NO_PLAN, ALONE = "no plan", "one process fails"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A comparison of ranks and one process.

    Attributes:
        word: One of those above.
        words: The first line of the report, or why there is none.
        born: Where, in the report's words.
        how: In which way it is wrong.
    """

    word: str
    words: str = ""
    born: str = ""
    how: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Family:
    """A family.

    Attributes:
        word: Why it was not compared, one of those above; '' if it was.
        words: The error.
        cut: Share of the parameters' numbers that ranks divide.
        apart: Of weights, loss and gradients, how far the ranks' are off and in which tensor, by
            comparing whole tensors of a step that nobody recorded.
        by_dtype: What the recordings say.
    """

    word: str = ""
    words: str = ""
    cut: float = 0.0
    apart: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    by_dtype: Mapping[str, Judgement] = field(default_factory=dict)

    def judged(self, by_dtype: Mapping[str, Judgement]) -> Family:
        """Return it with what recordings say."""
        return replace(self, by_dtype=by_dtype)

    def plain(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {name: value for name, value in asdict(self).items() if value}

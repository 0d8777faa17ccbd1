"""What was found of a family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..verdicts import BOUND

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

    @property
    def error(self) -> float:
        """The largest error of weights, loss and gradients."""
        return max((error for error, _ in self.apart.values()), default=0.0)

    @property
    def is_right(self) -> bool:
        """Whether ranks train as one process, whatever the recordings say."""
        return self.error < BOUND

    @property
    def false_alarm(self) -> bool:
        """Whether it is right, and reported wrong."""
        return self.is_right and any(each.word == WRONG for each in self.by_dtype.values())

    @property
    def missed(self) -> bool:
        """Whether it is wrong, and reported right."""
        return not self.is_right and any(each.word == RIGHT for each in self.by_dtype.values())

    def judged(self, by_dtype: Mapping[str, Judgement]) -> Family:
        """Return it with what recordings say."""
        return replace(self, by_dtype=by_dtype)

    def plain(self) -> dict[str, Any]:
        """Return it for JSON."""
        plain = {name: value for name, value in asdict(self).items() if value}
        if self.by_dtype:
            plain["by_dtype"] = {
                dtype: {name: value for name, value in each.items() if value}
                for dtype, each in plain["by_dtype"].items()
            }
        return plain

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Family:
        """Return what `plain` made."""
        by_dtype = {d: Judgement(**each) for d, each in plain.get("by_dtype", {}).items()}
        apart = {kind: (error, where) for kind, (error, where) in plain.get("apart", {}).items()}
        return cls(**{**plain, "by_dtype": by_dtype, "apart": apart})

"""The report of a proof, a table."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..compose.summation import ROOM
from .cases import Case
from .device import HERE, Where
from .differences import FACTOR, LOW, Difference
from .runner import RankReport


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case's outcome.

    Attributes:
        case: The layout and options that ran.
        seconds: Duration of the run.
        ranks: The findings of each rank; empty if the case did not run to its end.
        error: The ranks' tracebacks, if one failed.
        refused: The library's message, if it refuses this layout or option on every rank.
        unjudged: Reason why this dtype's rounding would hide faults; the case did not run then.
    """

    case: Case
    seconds: float
    ranks: list[RankReport]
    error: str = ""
    refused: str = ""
    unjudged: str = ""

    @property
    def passed(self) -> bool:
        """True if all ranks finished and found nothing that rounding does not explain."""
        return bool(self.ranks) and not any(rank.failures for rank in self.ranks)

    @property
    def replayed(self) -> list[float]:
        """The margins of expert choices taken from one process, as rounding would change them."""
        return [each for rank in self.ranks for each in rank.replayed]

    @property
    def failed(self) -> bool:
        """True if a fault was found, or the case could not be judged."""
        return not self.passed and not self.refused

    @property
    def worst(self) -> Difference | None:
        """The comparison nearest to its bound, or furthest beyond it."""
        found = [rank.worst for rank in self.ranks]
        return max(found, key=lambda difference: difference.severity) if found else None

    def row(self) -> tuple[str, ...]:
        """Return the cells of a table: case, verdict, error, bound, worst tensor."""
        worst = self.worst
        if worst is None:
            verdict = "refused" if self.refused else "not judged" if self.unjudged else "FAIL"
            reason = self.refused or self.unjudged or self.error.split("\n", 1)[0]
            return (str(self.case), verdict, "-", "-", reason)
        verdict = "pass" if self.passed else "FAIL"
        error, bound = f"{worst.error:.1e}", f"{worst.bound:.1e}"
        return (str(self.case), verdict, error, bound, f"{worst.what} (step {worst.step})")

    def explanation(self, command: str) -> str:
        """Describe the fault of a failed case, with the commands that repeat and bisect it."""
        if self.unjudged:
            return f"{self.case}: NOT JUDGED: {self.unjudged}"
        lines, found = [f"{self.case}: FAILED"], dict[tuple[str, int], Difference]()
        for failure in (f for rank in self.ranks for f in rank.failures):
            found.setdefault((failure.what, failure.step), failure)
        lines += [
            f"  {f.what}, step {f.step}, rank {f.rank}: relative error {f.error:.3g}, bound "
            f"{f.bound:.3g}; {f.note}"
            for f in found.values()
        ]
        if self.error:
            lines += [f"  {line}" for line in self.error.splitlines()]
        lines.append(f"  repeat it: {command} {self.case.arguments}")
        if any(not what.startswith("dropout ") for what, _ in found):  # bisect switches it off
            root = __package__.rpartition(".")[0]
            locating = command.replace(f"-m {__package__}", f"-m {root}.bisect run", 1)
            lines.append(f"  find the place: {locating} {self.case.arguments}")
        return "\n".join(lines)


HEADER = ("dp x pp x cp x tp (-ep)", "", "error", "bound", "worst tensor")


@dataclass(frozen=True, slots=True)
class Report:
    """All cases' outcomes.

    Attributes:
        results: One for each case.
        chain: The longest chain of additions, from which bounds follow; see `chain_length`.
        named: Whether the caller named the layouts; then none may be refused.
        command: The command that repeats a case once its own options are added.
        where: The kind of device and the backend.
    """

    results: list[CaseResult]
    chain: int
    named: bool = False
    command: str = field(default=f"python -m {__package__}")
    where: Where = HERE

    @property
    def passed(self) -> bool:
        """True if a case passed, none failed, and no layout that was named was refused."""
        if self.failures or (self.named and self.refusals):
            return False
        return any(result.passed for result in self.results)

    @property
    def failures(self) -> list[CaseResult]:
        """The cases that have a fault, or could not be judged."""
        return [result for result in self.results if result.failed]

    @property
    def refusals(self) -> list[CaseResult]:
        """The cases that the library refuses with an error message."""
        return [result for result in self.results if result.refused]

    def __str__(self) -> str:
        """Return the table, an explanation of each failure, and the summary."""
        rows = [HEADER, *(result.row() for result in self.results)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        lines += ["", *(r.explanation(self.command) for r in self.failures)]
        return "\n".join([*lines, self.summary()])

    def summary(self) -> str:
        """Return the last line of the report: counts, time and the bound."""
        passed = sum(result.passed for result in self.results)
        judged = len(self.results) - len(self.refusals)
        refused = f" ({len(self.refusals)} refused)" if self.refusals else ""
        tensors = sum(rank.compared for result in self.results for rank in result.ranks)
        seconds = sum(result.seconds for result in self.results)
        words = [
            f"{passed} of {judged} cases train like one process{self.where}{refused}: {tensors} "
            f"comparisons in {seconds:.0f} s",
            f"bound = machine epsilon x {ROOM:g} x root of ({self.chain} additions x step)",
        ]
        if any(result.case.dtype == LOW for result in self.results):
            words.append(f"in {LOW} {FACTOR} x what one process loses")
        if sent := sum(bool(result.replayed) for result in self.results):
            chosen = "experts chosen as in one process, where rounding chose others"
            words.append(f"{chosen}, in {sent} cases")
        return "; ".join(words)

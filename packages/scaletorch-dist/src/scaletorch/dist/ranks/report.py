"""Combine the outcomes of all ranks into one readable error."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field

from ..errors import RankFailedError
from ..naming import name_ranks

# The coordinates of a rank in messages, on a grid and for experts.
_COORDINATES = re.compile(r"(\brank \d+ \()?\bdp\d+ pp\d+ cp\d+ tp\d+\b(?: edp\d+ ep\d+ etp\d+\b)?")


@dataclass(slots=True)
class RankReport:
    """The outcome of each rank in one run."""

    name: str
    world_size: int
    results: dict[int, object] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)  # in the order of arrival
    exceptions: dict[int, BaseException] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)  # stack traces of unfinished ranks

    @property
    def pending(self) -> list[int]:
        """Ranks without an outcome so far."""
        return [
            rank
            for rank in range(self.world_size)
            if rank not in self.results and rank not in self.failures
        ]

    def died(self, rank: int, exit_code: int | None, stacks: str) -> None:
        """Record a rank whose process ended without an answer, with its threads' stacks."""
        how = f"rank {rank} {describe_exit(exit_code)} before it returned\n"
        self.failures[rank] = f"{how}{stacks}\n" if stacks else how

    def error(self, timeout: float | None, timed_out: bool) -> RankFailedError:
        """Return one error with all failures, in order of arrival, and all stacks."""
        hung = tuple(rank for rank in self.stacks if rank not in self.failures)
        lines = [self._headline(hung, timeout, timed_out)]
        for ranks, text in self._alike():
            lines.append(f"\n--- {name_ranks(sorted(ranks))} failed ---\n{text.rstrip()}")
        for rank in hung:
            lines.append(f"\n--- rank {rank} was still at ---\n{self.stacks[rank].rstrip()}")
        return RankFailedError(
            "\n".join(lines),
            failures=dict(self.failures),
            exceptions=dict(self.exceptions),
            finished=tuple(sorted(self.results)),
            hung=hung,
        )

    def _alike(self) -> list[tuple[list[int], str]]:
        """Group ranks whose failures differ only in coordinates; keep the first one's text."""
        found: dict[str, tuple[list[int], str]] = {}
        for rank, text in self.failures.items():
            found.setdefault(without_coordinates(text), ([], text))[0].append(rank)
        return list(found.values())

    def _headline(self, hung: tuple[int, ...], timeout: float | None, timed_out: bool) -> str:
        parts = []
        if self.failures:
            parts.append(f"{name_ranks(list(self.failures))} failed")
        if hung:
            verb = "was" if len(hung) == 1 else "were"
            why = f"had not finished after {timeout:g} s" if timed_out else f"{verb} left waiting"
            parts.append(f"{name_ranks(list(hung))} {why}")
        if self.results:
            parts.append(f"{name_ranks(sorted(self.results))} finished")
        return f"{self.name} on {self.world_size} ranks: " + "; ".join(parts)


def without_coordinates(text: str) -> str:
    """Return a message without the grid coordinates of its rank."""
    return _COORDINATES.sub("", text)


def describe_exit(exit_code: int | None) -> str:
    """Describe how a process ended."""
    if exit_code is None:
        return "disappeared with the fork-server"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"

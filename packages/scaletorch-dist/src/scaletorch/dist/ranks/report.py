"""Turning what became of the ranks into one error that can be read from the top."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from ..errors import RankFailedError


@dataclass(slots=True)
class RankReport:
    """What became of each rank in one run."""

    name: str
    world_size: int
    results: dict[int, object] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)  # in the order in which they came
    exceptions: dict[int, BaseException] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)  # where unfinished ranks were

    @property
    def pending(self) -> list[int]:
        """Ranks of which nothing is known yet."""
        return [
            rank
            for rank in range(self.world_size)
            if rank not in self.results and rank not in self.failures
        ]

    def died(self, rank: int, exit_code: int | None) -> None:
        """Record a rank whose process ended without an answer."""
        self.failures[rank] = f"rank {rank} {describe_exit(exit_code)} before it returned\n"

    def error(self, timeout: float | None, timed_out: bool) -> RankFailedError:
        """The error that tells all of it, first failure first."""
        hung = tuple(rank for rank in self.stacks if rank not in self.failures)
        lines = [self._headline(hung, timeout, timed_out)]
        alike: dict[str, list[int]] = {}
        for rank, text in self.failures.items():
            alike.setdefault(text.rstrip(), []).append(rank)
        for text, ranks in alike.items():
            how = "failed" if len(ranks) == 1 else "failed alike"
            lines.append(f"\n--- {_ranks(sorted(ranks))} {how} ---\n{text}")
        for rank in hung:
            lines.append(f"\n--- rank {rank} was still at ---\n{self.stacks[rank].rstrip()}")
        return RankFailedError(
            "\n".join(lines),
            failures=dict(self.failures),
            exceptions=dict(self.exceptions),
            finished=tuple(sorted(self.results)),
            hung=hung,
        )

    def _headline(self, hung: tuple[int, ...], timeout: float | None, timed_out: bool) -> str:
        parts = []
        if self.failures:
            parts.append(f"{_ranks(list(self.failures))} failed")
        if hung:
            verb = "was" if len(hung) == 1 else "were"
            why = f"had not finished after {timeout:g} s" if timed_out else f"{verb} left waiting"
            parts.append(f"{_ranks(list(hung))} {why}")
        if self.results:
            parts.append(f"{_ranks(sorted(self.results))} finished")
        return f"{self.name} on {self.world_size} ranks: " + "; ".join(parts)


def _ranks(ranks: list[int]) -> str:
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, ranks))}"


def describe_exit(exit_code: int | None) -> str:
    """How a process ended, in words."""
    if exit_code is None:
        return "disappeared with the fork-server"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"

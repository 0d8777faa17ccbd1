"""Collect one answer from every rank before a deadline, or raise one readable error."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

from ..errors import RankFailedError
from ..members import name_ranks
from .process import RankProcess

FAILURE_GRACE = 2.0  # seconds that other ranks get to finish or fail after the first failure
STACK_WAIT = 0.5  # seconds to wait for the stacks of ranks that hang

_CHILD = os.path.join(os.path.dirname(__file__), "child.py")
Answer = tuple[str, Any, Any]  # a message from `child`: its kind and two values
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
        return sorted(set(range(self.world_size)) - {*self.results, *self.failures})

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
        phrases = []
        if self.failures:
            phrases.append(f"{name_ranks(list(self.failures))} failed")
        if hung:
            verb = "was" if len(hung) == 1 else "were"
            why = f"had not finished after {timeout:g} s" if timed_out else f"{verb} left waiting"
            phrases.append(f"{name_ranks(list(hung))} {why}")
        if self.results:
            phrases.append(f"{name_ranks(sorted(self.results))} finished")
        return f"{self.name} on {self.world_size} ranks: " + "; ".join(phrases)


def without_coordinates(text: str) -> str:
    """Return a message without the grid coordinates of its rank."""
    return _COORDINATES.sub("", text)


def describe_exit(exit_code: int | None) -> str:
    """Describe how a process ended."""
    if exit_code is None:
        return "ended with the fork-server"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def collect(
    processes: Sequence[RankProcess], report: RankReport, timeout: float | None
) -> dict[int, Answer]:
    """Collect every rank's answer and fill the report; after an error, kill the processes."""
    __tracebackhide__ = True
    answers: dict[int, Answer] = {}
    deadline = None if timeout is None else time.monotonic() + timeout
    grace: float | None = None
    while report.pending:
        if report.failures and grace is None:
            grace = time.monotonic() + FAILURE_GRACE
        limits = [limit for limit in (deadline, grace) if limit is not None]
        remaining = min(limits) - time.monotonic() if limits else None
        if remaining is not None and remaining <= 0:
            break
        for rank in _ready_ranks(processes, report.pending, remaining):
            answer = _receive(processes[rank])
            if answer is None:
                report.died(rank, processes[rank].exit_code, _last_stacks(processes[rank]))
            else:
                answers[rank] = answer
                _record(rank, answer, report)
    if report.failures or report.pending:
        _take_stacks(processes, report)
        raise report.error(timeout, timed_out=grace is None)
    return answers


def _ready_ranks(
    processes: Sequence[RankProcess], pending: list[int], remaining: float | None
) -> list[int]:
    sources: dict[Any, int] = {}
    for rank in pending:
        sources[processes[rank].connection] = rank
        sources[processes[rank].status_fd] = rank
    return sorted({sources[source] for source in wait(list(sources), remaining)})


def _receive(process: RankProcess) -> Answer | None:
    """Return the answer of a ready process, or None if it has died."""
    with contextlib.suppress(EOFError, OSError):
        if process.connection.poll():
            answer: Answer = process.connection.recv()
            return answer
    wait([process.status_fd], 5.0)  # the server sends the exit status a moment later
    process.read_status()
    return None


def _record(rank: int, answer: Answer, report: RankReport) -> None:
    kind, first, second = answer
    if kind == "failed":
        report.failures[rank] = first
        if second is not None:
            report.exceptions[rank] = ForkingPickler.loads(second)
        return
    try:
        report.results[rank] = None if first is None else ForkingPickler.loads(first)
    except Exception as error:
        report.failures[rank] = f"its result cannot be unpickled here: {error!r}\n"


def _take_stacks(processes: Sequence[RankProcess], report: RankReport) -> None:
    """Make each unfinished rank write its stack, even if it is blocked in C++."""
    pending = report.pending
    for rank in pending:
        processes[rank].signal(signal.SIGUSR1)
    deadline = time.monotonic() + STACK_WAIT
    for rank in pending:
        text = ""
        while not text.endswith("\n") and time.monotonic() < deadline:
            time.sleep(0.01)
            with open(processes[rank].stack_file) as file:
                text = file.read()
        report.stacks[rank] = _own_frames(text) or "(no stack: it did not answer a signal)"


def _last_stacks(process: RankProcess) -> str:
    """Return the stacks that a rank wrote when a signal such as SIGSEGV killed it."""
    with contextlib.suppress(OSError), open(process.stack_file) as file:
        return _own_frames(file.read().partition("\nExtension modules:")[0]).strip()
    return ""


def _own_frames(stacks: str) -> str:
    """Return the stacks without the frames that called the rank's function."""
    hidden = False
    lines = []
    for line in stacks.splitlines():
        hidden = line.startswith("  ") and (hidden or _CHILD in line)
        if not hidden:
            lines.append(line)
    return "\n".join(lines)

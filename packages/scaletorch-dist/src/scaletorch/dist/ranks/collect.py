"""Collecting one answer from every rank before a deadline, or finding out why there is none."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

from .process import RankProcess
from .report import RankReport

FAILURE_GRACE = 2.0  # s that other ranks get to finish or fail by themselves after a first failure
STACK_WAIT = 0.5  # s to wait for the stacks of ranks that hang

_CHILD = os.path.join(os.path.dirname(__file__), "child.py")

Answer = tuple[str, Any, Any]  # what `child` sends: its kind and two parts


def collect(
    processes: Sequence[RankProcess], report: RankReport, timeout: float | None
) -> dict[int, Answer]:
    """One answer of every rank; failures are written into `report`.

    Args:
        processes: The ranks in order.
        report: Filled with failures, results (unpickled) and the stacks of unfinished ranks.
        timeout: Seconds, or None to wait as long as it takes.

    Returns:
        rank → its answer.

    Raises:
        RankFailedError: Not every rank returned; the processes are still to be killed.
    """
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
    """The answer that a ready process sent, or None after its death."""
    try:
        if process.connection.poll():
            answer: Answer = process.connection.recv()
            return answer
    except (EOFError, OSError):
        pass
    wait([process.status_fd], 5.0)  # how it ended comes by way of the server, a moment later
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
    """Have each unfinished rank write its stack, also when it is blocked in C++."""
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
        report.stacks[rank] = _own_part(text) or "(no stack: it did not answer a signal)"


def _last_stacks(process: RankProcess) -> str:
    """Return the stacks that a rank wrote as a signal such as SIGSEGV ended it."""
    with contextlib.suppress(OSError), open(process.stack_file) as file:
        return _own_part(file.read().partition("\nExtension modules:")[0]).strip()
    return ""


def _own_part(stacks: str) -> str:
    """Stacks without the frames below the function that was run."""
    hidden = False
    lines = []
    for line in stacks.splitlines():
        hidden = line.startswith("  ") and (hidden or _CHILD in line)
        if not hidden:
            lines.append(line)
    return "\n".join(lines)

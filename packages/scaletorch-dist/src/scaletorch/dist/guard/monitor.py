"""The monitor: a process of its own beside rank 0 that hears every rank and declares faults.

It needs nothing of torch and shares no interpreter with a rank, so that no rank's lock, crash or
stop can silence it. This module, and all that it imports, is run without the packages around it.
"""

from __future__ import annotations

import contextlib
import json
import resource
import selectors
import socket
import sys
import time
import traceback
from typing import Any

from .book import Book
from .diagnosis import diagnose
from .door import Door
from .facts import Entry, Fault, Need, Slowness
from .ledger import ledger_path, read_ledger, tails
from .wire import LONGEST, Line
from .wording import tell

PERIOD = 0.05  # s between two looks at what is known, if nothing comes
BRIEF = 0.01  # s between two looks, if something does
SHARE = 0.05  # of the time that looking may take
CONFIRM = 0.4  # s that ranks have to tell what they do before a fault is declared
WELCOME = 60.0  # s that all ranks get to come
LINGER = 30.0  # s that ranks get to hang up after a verdict
PAUSE = 1.0  # s without a look that count as no time: this process itself did not run


class Monitor:
    """Hears all ranks.

    Args:
        listener: where they connect.
        token: what they must know.
        size: how many there are.
        folder: where the ledgers are.
        limits: `warn`, `patience` and `silence`, see `Picture`.
    """

    def __init__(
        self, listener: socket.socket, token: str, size: int, folder: str, **limits: float
    ) -> None:
        self._folder = folder
        self._book = Book(size, **limits)
        self._reports = self._book.picture.reports
        self._selector = selectors.DefaultSelector()
        self._door = Door(listener, token, size, self._selector)
        self._lines: dict[int, Line] = {}
        self._pids: dict[int, tuple[int, int]] = {}  # rank → process and host
        self._warned: dict[tuple[int, ...], float] = {}
        self._suspected: float | None = None  # since when there seems to be a fault
        self._over: float | None = None  # since when there is a verdict, or all have finished
        self._looked = self._busy = 0.0
        self._lost = 0.0  # s in which this process did not run
        self._seen = time.monotonic()

    def run(self) -> None:
        """Serve until all ranks have gone; a fault of the guard itself ends it, and no rank."""
        begun = time.monotonic()
        try:
            while self._needed(begun):
                ready = self._selector.select(PERIOD if self._suspected is None else BRIEF)
                for key, _ in ready:
                    if key.data is None:
                        self._door.accept()
                    else:
                        self._hear(key.data)
                self._door.look(time.monotonic())
                self._look(self._now())
        except Exception as error:
            self._turn_off("".join(traceback.format_exception(error)))
        finally:
            self.close()

    def close(self) -> None:
        """Close all sockets."""
        self._door.close()
        self._selector.close()
        for line in self._lines.values():
            line.close()

    def _needed(self, begun: float) -> bool:
        if len(self._lines) < len(self._reports):
            return time.monotonic() - begun < WELCOME
        if self._over is not None and time.monotonic() - self._over > LINGER:
            return False
        return any(line.open for line in self._lines.values())

    def _now(self) -> float:
        """Return the time, less what passed while this process was stopped or starved."""
        now = time.monotonic()
        gap, self._seen = now - self._seen, now
        if gap > PAUSE:
            self._lost += gap
        return now - self._lost

    def _hear(self, line: Line) -> None:
        if line.rank is None:
            greeting = self._door.hear(line)
            if greeting is not None:
                self._greet(line, greeting)
            return
        for message in line.receive():
            if message["is"] == "off":
                self._turn_off(message["why"])
            self._book.take(line.rank, message, self._now())
        if line.broken:
            self._turn_off(f"{self._reports[line.rank].label} said what is no message")
        if not line.open:
            self._selector.unregister(line)
            line.close()
            if self._reports[line.rank].alive:
                self._lose(line.rank)

    def _greet(self, line: Line, message: dict[str, Any]) -> None:
        rank = message["rank"]
        if rank not in self._reports or rank in self._lines:
            self._selector.unregister(line)
            line.close()
            return
        line.rank, line.longest = rank, LONGEST
        self._lines[rank] = line
        self._reports[rank].label = str(message["label"])
        self._pids[rank] = message["pid"], message["host"]
        if len(self._lines) < len(self._reports):
            return
        self._door.close()
        for other, own in self._lines.items():
            self._reports[other].heard = self._now()
            first = self._pids[0][0] if self._pids[0][1] == self._pids[other][1] else None
            own.send({"is": "welcome", "watch": self._neighbours(other), "first": first})

    def _beside(self, rank: int) -> list[int]:
        """Return the other ranks of a rank's host, the next one first."""
        host = self._pids[rank][1]
        same = sorted(other for other, (_, theirs) in self._pids.items() if theirs == host)
        place = same.index(rank)
        return same[place + 1 :] + same[:place]

    def _neighbours(self, rank: int) -> list[tuple[int, int]]:
        return [(other, self._pids[other][0]) for other in self._beside(rank)[:1]]

    def _lose(self, rank: int) -> None:
        """Note that a rank's connection has closed without a word."""
        what = f"its process {self._pids[rank][0]} ended without a word (killed, or aborted)"
        self._book.lose(rank, what, _left_by(self._folder, rank), self._now())

    def _look(self, now: float) -> None:
        """See whether anything is wrong, and tell everybody."""
        pause = 0.0 if self._suspected is not None else max(BRIEF, self._busy / SHARE)
        if now - self._looked < pause:
            return
        if self._over is not None or len(self._lines) < len(self._reports):
            return
        begun = time.monotonic()
        verdict = diagnose(self._book.picture, now)
        self._looked, self._busy = now, time.monotonic() - begun
        if isinstance(verdict, Fault):
            if self._confirmed(now):
                self._declare(verdict)
        elif isinstance(verdict, Need):
            self._ask(verdict, now)
        elif isinstance(verdict, Slowness):
            self._warn(verdict)
        elif all(report.end == "finished" for report in self._reports.values()):
            self._tell_all({"is": "end"})
        self._examine(now)

    def _confirmed(self, now: float) -> bool:
        """Ask everybody what they do before a fault is declared, and wait a moment for answers."""
        able = [report for report in self._reports.values() if report.able(now)]
        if self._suspected is None:
            self._suspected = now
            self._ask(Need(tuple(report.rank for report in able)), now, afresh=True)
        known = all(report.asked >= self._suspected for report in able)
        return known or now - self._suspected > CONFIRM

    def _declare(self, fault: Fault) -> None:
        for report in self._reports.values():
            if report.alive and not report.able(self._looked):  # what it said is old
                report.tails = _left_by(self._folder, report.rank) or report.tails
                report.waits, report.silent = [], True
        text = tell(fault, self._book.picture, self._folder)
        self._tell_all({"is": "fault", "kind": fault.kind, "ranks": fault.ranks, "text": text})

    def _turn_off(self, why: str) -> None:
        if self._over is None:
            self._tell_all({"is": "off", "why": why})

    def _tell_all(self, message: dict[str, Any]) -> None:
        self._over = time.monotonic()
        for line in list(self._lines.values()):
            line.send(message)

    def _ask(self, need: Need, now: float, *, afresh: bool = False) -> None:
        for rank in need.ranks:
            number = self._book.question(rank, now, afresh=afresh)
            if number is not None:
                self._lines[rank].send({"is": "ask", "number": number})

    def _examine(self, now: float) -> None:
        """Have those beside a silent rank look at its process."""
        for rank in self._book.to_examine(now):
            able = [other for other in self._beside(rank) if self._reports[other].able(now)]
            if able:
                self._lines[able[0]].send({"is": "look", "rank": rank, "pid": self._pids[rank][0]})

    def _warn(self, slowness: Slowness) -> None:
        """Have the first rank that can speak warn of slow ones."""
        if slowness.seconds < self._warned.get(slowness.ranks, 0.0):
            return
        self._warned[slowness.ranks] = 2 * slowness.seconds
        stacks = [
            f"{report.label} is at:\n{report.stack.rstrip()}"
            for report in map(self._reports.__getitem__, slowness.ranks)
            if report.stack and report.able(self._looked)
        ]
        text = "\n".join([slowness.headline, *stacks])
        for rank, line in sorted(self._lines.items()):
            if self._reports[rank].able(self._looked):
                line.send({"is": "warn", "text": text})
                return


def _left_by(folder: str, rank: int) -> dict[str, dict[int, Entry]] | None:
    """Read what a rank of this host has left."""
    try:
        return tails(read_ledger(ledger_path(folder, rank))[3])
    except (OSError, ValueError):
        return None


def serve() -> None:
    """Run as the process that `start_monitor` starts, and writes what is agreed to."""
    agreed = json.load(sys.stdin)
    with contextlib.suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    listener = socket.socket(fileno=agreed.pop("listener"))
    Monitor(listener, **agreed).run()

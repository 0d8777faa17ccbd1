"""The monitor: a thread in rank 0's process that hears every rank and declares faults."""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
import threading
import time
from typing import Any

from .book import Book
from .diagnosis import diagnose
from .facts import Entry, Fault, Need, Slowness
from .ledger import ledger_path, read_ledger, tails
from .wire import Line
from .wording import tell

PERIOD = 0.05  # s between two looks at what is known, if nothing comes
BRIEF = 0.01  # s between two looks, if something does
SHARE = 0.05  # of the time that looking may take
CONFIRM = 0.4  # s that ranks have to tell what they do before a fault is declared

logger = logging.getLogger(__package__)


class Monitor(threading.Thread):
    """Hears all ranks.

    Args:
        listener: where they connect.
        token: what they must know.
        size: how many there are.
        folder: where the ledgers are.
        warn: see `Picture`.
        patience: see `Picture`.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        size: int,
        folder: str,
        *,
        warn: float,
        patience: float,
    ) -> None:
        super().__init__(name="scaletorch-guard-monitor", daemon=True)
        self._listener, self._token, self._folder = listener, token, folder
        self._book = Book(size, warn=warn, patience=patience)
        self._reports = self._book.picture.reports
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, Line] = {}
        self._pids: dict[int, tuple[int, int]] = {}  # rank → process and host
        self._warned: dict[tuple[int, ...], float] = {}
        self._suspected: float | None = None  # since when there seems to be a fault
        self._over = False  # there is a verdict, or all have finished
        self._looked = self._busy = 0.0

    def run(self) -> None:
        """Serve until all ranks have gone."""
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        while not self._lines or any(line.open for line in self._lines.values()):
            ready = self._selector.select(PERIOD if self._suspected is None else BRIEF)
            for key, _ in ready:
                if key.data is None:
                    self._accept()
                else:
                    self._hear(key.data)
            self._look(time.monotonic())
        self.close()

    def close(self) -> None:
        """Close all sockets."""
        self._listener.close()
        self._selector.close()
        for line in self._lines.values():
            line.close()

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        line = Line(sock)
        self._selector.register(line, selectors.EVENT_READ, line)

    def _hear(self, line: Line) -> None:
        for message in line.receive():
            if line.rank is None:
                self._greet(line, message)
            else:
                self._book.take(line.rank, message, time.monotonic())
        if not line.open:
            self._selector.unregister(line)
            line.close()
            if line.rank is not None and self._reports[line.rank].alive:
                self._lost(line.rank)

    def _greet(self, line: Line, message: dict[str, Any]) -> None:
        rank = message.get("rank")
        known = hmac.compare_digest(str(message.get("token", "")), self._token)
        if not known or rank not in self._reports or rank in self._lines:
            line.open = False
            return
        line.rank = rank
        self._lines[rank] = line
        self._reports[rank].label = str(message["label"])
        self._pids[rank] = message["pid"], message["host"]
        if len(self._lines) == len(self._reports):
            for other, own in self._lines.items():
                own.send({"is": "welcome", "watch": self._neighbours(other)})

    def _neighbours(self, rank: int) -> list[tuple[int, int]]:
        """Return the next rank on the same host, and rank 0 where it is there, with processes."""
        host = self._pids[rank][1]
        same = sorted(other for other, (_, theirs) in self._pids.items() if theirs == host)
        watched = {same[(same.index(rank) + 1) % len(same)]}
        if same[0] == 0:
            watched.add(0)
        return [(other, self._pids[other][0]) for other in sorted(watched - {rank})]

    def _lost(self, rank: int) -> None:
        """Note that a rank's connection has closed without a word."""
        what = f"its process {self._pids[rank][0]} ended without a word (killed, or aborted)"
        self._book.lose(rank, what, _left_by(self._folder, rank), time.monotonic())

    def _look(self, now: float) -> None:
        """See whether anything is wrong, and tell everybody."""
        pause = 0.0 if self._suspected is not None else max(BRIEF, self._busy / SHARE)
        if now - self._looked < pause:
            return
        if self._over or len(self._lines) < len(self._reports):
            return
        verdict = diagnose(self._book.picture, now)
        self._looked = time.monotonic()
        self._busy = self._looked - now
        if isinstance(verdict, Fault):
            if self._confirmed(now):
                self._declare(verdict)
        elif isinstance(verdict, Need):
            self._ask(verdict, now)
        elif isinstance(verdict, Slowness):
            self._warn(verdict)
        elif all(report.end == "finished" for report in self._reports.values()):
            self._tell_all({"is": "end"})

    def _confirmed(self, now: float) -> bool:
        """Ask everybody what they do before a fault is declared, and wait a moment for answers."""
        alive = [report for report in self._reports.values() if report.alive]
        able = [report for report in alive if report.stopped is None]
        if self._suspected is None:
            self._suspected = now
            self._ask(Need(tuple(report.rank for report in able)), now, afresh=True)
        known = all(report.asked >= self._suspected for report in able)
        return known or now - self._suspected > CONFIRM

    def _declare(self, fault: Fault) -> None:
        text = tell(fault, self._book.picture, self._folder)
        self._tell_all({"is": "fault", "kind": fault.kind, "ranks": fault.ranks, "text": text})

    def _tell_all(self, message: dict[str, Any]) -> None:
        self._over = True
        for rank in sorted(self._lines, reverse=True):  # rank 0, which may end then, is the last
            self._lines[rank].send(message)

    def _ask(self, need: Need, now: float, *, afresh: bool = False) -> None:
        for rank in need.ranks:
            number = self._book.question(rank, now, afresh=afresh)
            if number is not None:
                self._lines[rank].send({"is": "ask", "number": number})

    def _warn(self, slowness: Slowness) -> None:
        if slowness.seconds < self._warned.get(slowness.ranks, 0.0):
            return
        self._warned[slowness.ranks] = 2 * slowness.seconds
        stacks = [
            f"{report.label} is at:\n{report.stack.rstrip()}"
            for report in map(self._reports.__getitem__, slowness.ranks)
            if report.stack
        ]
        logger.warning("%s", "\n".join([slowness.headline, *stacks]))


def _left_by(folder: str, rank: int) -> dict[str, dict[int, Entry]] | None:
    """Read what a rank of this host has left."""
    try:
        return tails(read_ledger(ledger_path(folder, rank))[3])
    except (OSError, ValueError):
        return None

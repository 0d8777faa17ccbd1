"""The monitor: a thread in rank 0's process that hears every rank and declares faults."""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
import threading
import time
from typing import Any

from .diagnosis import diagnose
from .facts import Channel, Fault, Need, Picture, Report, Slowness, Wait, entry_from_list
from .ledger import ledger_path, read_ledger, tails
from .mismatch import drop_agreed
from .wire import Line
from .wording import tell

PERIOD = 0.05  # s between two looks at what is known
CONFIRM = 0.4  # s that ranks have to tell what they do before a fault is declared
SHARE = 0.05  # of the time that looking may take
REMEMBERED = 64  # ends of steps, and marks, of a rank that nobody has compared with yet

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
        self.picture = Picture({r: Report(r) for r in range(size)}, {}, warn, patience)
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, Line] = {}
        self._pids: dict[int, tuple[int, int]] = {}  # rank → process and host
        self._asked: dict[int, tuple[int, float]] = {}  # rank → question under way, since when
        self._question = 0
        self._warned: dict[tuple[int, ...], float] = {}
        self._fault: dict[str, Any] | None = None
        self._suspected: float | None = None  # since when there seems to be a fault
        self._looked = 0.0
        self._busy = 0.0
        self._over = False

    def run(self) -> None:
        """Serve until all ranks have gone."""
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        while not self._over:
            for key, _ in self._selector.select(PERIOD):
                if key.data is None:
                    self._accept()
                else:
                    self._hear(key.data)
            self._look(time.monotonic())
        self.close()

    def close(self) -> None:
        """Close all sockets."""
        self._listener.close()
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
                self._take(self.picture.reports[line.rank], message)
        if not line.open:
            self._selector.unregister(line)
            line.close()
            if line.rank is not None:
                self._lost(self.picture.reports[line.rank])

    def _greet(self, line: Line, message: dict[str, Any]) -> None:
        rank = message.get("rank")
        token = str(message.get("token", ""))
        if not hmac.compare_digest(token, self._token) or rank not in self.picture.reports:
            line.open = False
            return
        line.rank = rank
        self._lines[rank] = line
        self.picture.reports[rank].label = str(message["label"])
        self._pids[rank] = message["pid"], message["host"]
        if len(self._lines) == len(self.picture.reports):
            for other, own in self._lines.items():
                own.send({"is": "welcome", "watch": self._neighbours(other)})

    def _neighbours(self, rank: int) -> list[tuple[int, int]]:
        """Return the next rank on the same host, and rank 0 where it is there, with processes."""
        host = self._pids[rank][1]
        same = sorted(r for r, (_, theirs) in self._pids.items() if theirs == host)
        following = same[(same.index(rank) + 1) % len(same)]
        found = sorted({following, *same[:1]} - {rank}) if same[0] == 0 else [following]
        return [(r, self._pids[r][0]) for r in found if r != rank]

    def _take(self, report: Report, message: dict[str, Any]) -> None:
        """Write down what a rank tells."""
        now = time.monotonic()
        report.heard = now
        kind = message["is"]
        if "counts" in message:
            self._take_lease(report, message, now)
        if kind == "answer":
            number, at = self._asked.pop(report.rank, (0, 0.0))
            if number == message["number"]:
                report.asked = at
            report.stack = message["stack"]
            report.tails = tails([entry_from_list(values) for values in message["tail"]])
        elif kind == "raised" and report.alive:
            report.end, report.ended, report.what = "exception", now, message["what"]
            report.tails = tails([entry_from_list(values) for values in message["tail"]])
        elif kind == "bye" and report.alive:
            report.end, report.ended = "finished", now
        elif kind == "stopped":
            for rank in message["ranks"]:
                other = self.picture.reports[rank]
                other.stopped = now if other.stopped is None else other.stopped
        elif kind == "running":
            for rank in message["ranks"]:
                self.picture.reports[rank].stopped = None

    def _take_lease(self, report: Report, message: dict[str, Any], now: float) -> None:
        for key, (label, members, is_message) in message["channels"].items():
            self.picture.channels.setdefault(key, Channel(label, tuple(members), is_message))
        report.counts |= message["counts"]
        for key, marks in message["marks"].items():
            own = report.marks.setdefault(key, {})
            own |= {count: rolling for count, rolling in marks}
            _forget(own)
        for step, states in message["steps"]:
            report.step = step
            report.steps |= {(step, key): (count, roll) for key, count, roll in states}
        _forget(report.steps, REMEMBERED * max(1, len(self.picture.channels)))
        report.waits = [Wait(*values) for values in message["waits"]]
        report.since = {w.number: report.since.get(w.number, now) for w in report.waits}
        report.free, report.foreign = message["free"], message["foreign"]
        if message["marks"] or message["steps"]:
            drop_agreed(self.picture)

    def _lost(self, report: Report) -> None:
        """Note that a rank's connection has closed."""
        if report.alive:
            pid = self._pids[report.rank][0]
            report.end, report.ended = "death", time.monotonic()
            report.what = f"its process {pid} ended without a word (killed, or aborted)"
            report.tails = _tails_of_dead(self._folder, report.rank)
        if all(not line.open for line in self._lines.values()):
            self._over = True

    def _look(self, now: float) -> None:
        """See whether anything is wrong, and tell everybody."""
        if now - self._looked < max(PERIOD / 2, self._busy / SHARE):
            return
        if len(self._lines) < len(self.picture.reports) or self._fault is not None:
            return
        verdict = diagnose(self.picture, now)
        self._looked = time.monotonic()
        self._busy = self._looked - now
        if isinstance(verdict, Fault):
            if self._confirmed(now):
                self._declare(verdict)
        elif isinstance(verdict, Need):
            self._ask(verdict, now)
        elif isinstance(verdict, Slowness):
            self._warn(verdict)
        elif all(report.end == "finished" for report in self.picture.reports.values()):
            self._tell_all({"is": "end"})

    def _confirmed(self, now: float) -> bool:
        """Ask everybody what they do before a fault is declared, and wait a moment for answers."""
        alive = [r for r in self.picture.reports.values() if r.alive and r.stopped is None]
        if self._suspected is None:
            self._suspected = now
            self._asked.clear()
            self._ask(Need(tuple(report.rank for report in alive)), now)
        known = all(report.asked >= self._suspected for report in alive)
        return known or now - self._suspected > CONFIRM

    def _declare(self, fault: Fault) -> None:
        text = tell(fault, self.picture, self._folder)
        self._fault = {"is": "fault", "kind": fault.kind, "ranks": fault.ranks, "text": text}
        self._tell_all(self._fault)

    def _tell_all(self, message: dict[str, Any]) -> None:
        for line in sorted(self._lines.values(), key=lambda line: not line.rank):  # rank 0 last
            line.send(message)

    def _ask(self, need: Need, now: float) -> None:
        for rank in need.ranks:
            if rank in self._asked and now - self._asked[rank][1] < 1.0:
                continue
            self._question += 1
            self._asked[rank] = self._question, now
            self._lines[rank].send({"is": "ask", "number": self._question})

    def _warn(self, slowness: Slowness) -> None:
        if slowness.seconds < self._warned.get(slowness.ranks, 0.0):
            return
        self._warned[slowness.ranks] = 2 * slowness.seconds
        stacks = [
            f"{report.label} is at:\n{report.stack.rstrip()}"
            for rank in slowness.ranks
            if (report := self.picture.reports[rank]).stack
        ]
        logger.warning("%s", "\n".join([slowness.headline, *stacks]))


def _forget(known: dict[Any, Any], limit: int = REMEMBERED) -> None:
    """Forget the oldest."""
    for key in list(known)[: max(0, len(known) - limit)]:
        del known[key]


def _tails_of_dead(folder: str, rank: int) -> dict[str, Any] | None:
    """Read what a rank of this host has left."""
    try:
        return tails(read_ledger(ledger_path(folder, rank))[3])
    except (OSError, ValueError):
        return None

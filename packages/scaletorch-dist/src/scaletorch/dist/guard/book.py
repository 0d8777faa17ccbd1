"""Writing down what the ranks tell, message by message."""

from __future__ import annotations

from typing import Any

from .facts import (
    HUSH,
    Channel,
    Entry,
    Picture,
    Report,
    Sign,
    Wait,
    entry_from_list,
    lease_period,
)
from .ledger import tails
from .mismatch import drop_agreed

REMEMBERED = 64  # marks, and ends of steps, of a rank that nobody has compared with yet
AGAIN = 1.0  # s after which a question that was not answered is put again

Message = dict[str, Any]


class Book:
    """What is known of all ranks.

    Attributes:
        picture: all of it.
    """

    def __init__(self, size: int, *, warn: float, patience: float, silence: float = 10.0) -> None:
        hush = HUSH * lease_period(size)
        reports = {rank: Report(rank, hush=hush) for rank in range(size)}
        self.picture = Picture(reports, {}, warn, patience, silence)
        self._asked: dict[int, tuple[int, float]] = {}  # rank → question under way, since when
        self._question = 0
        self._examined: dict[int, float] = {}

    def question(self, rank: int, now: float, *, afresh: bool = False) -> int | None:
        """Return the number of a new question to a rank; None while one is under way."""
        if rank in self._asked and now - self._asked[rank][1] < AGAIN and not afresh:
            return None
        self._question += 1
        self._asked[rank] = self._question, now
        return self._question

    def to_examine(self, now: float) -> list[int]:
        """Return the silent ranks whose processes are to be looked at now."""
        reports = self.picture.reports.values()
        silent = [r for r in reports if r.alive and r.stopped is None and not r.able(now)]
        due = [r.rank for r in silent if now - self._examined.get(r.rank, 0.0) >= AGAIN]
        self._examined |= dict.fromkeys(due, now)
        return due

    def lose(
        self, rank: int, what: str, left: dict[str, dict[int, Entry]] | None, now: float
    ) -> None:
        """Write down a death, and the ledger's tails that the dead has left."""
        report = self.picture.reports[rank]
        report.end, report.ended, report.what = "death", now, what
        report.tails = left

    def take(self, rank: int, message: Message, now: float) -> None:
        """Write down what a rank tells."""
        report = self.picture.reports[rank]
        report.heard = now
        report.signs.clear()
        report.stopped = None
        kind = message["is"]
        if "counts" in message:
            self._take_lease(report, message, now)
        if "tail" in message:
            report.tails = tails([entry_from_list(values) for values in message["tail"]])
        if kind == "answer":
            report.stack = message["stack"]
            if self._asked.get(rank, (0, 0.0))[0] == message["number"]:
                report.asked = self._asked.pop(rank)[1]
        elif kind == "raised" and report.alive:
            report.end, report.ended, report.what = "exception", now, message["what"]
            report.headline = message["headline"]
        elif kind == "bye" and report.alive:
            report.end, report.ended = "finished", now
        elif kind in ("signs", "stopped", "running"):
            self._take_seen(message, now)

    def _take_seen(self, message: Message, now: float) -> None:
        """Write down what a rank has seen of others' processes."""
        kind = message["is"]
        for other in map(self.picture.reports.__getitem__, message["ranks"]):
            if kind == "signs":
                if not other.able(now):
                    recent = [s for s in other.signs if now - s.time <= self.picture.silence]
                    other.signs = [*recent, Sign(now, *message["signs"])]
                continue
            begun = now if other.stopped is None else other.stopped
            other.stopped, other.still = (begun, now) if kind == "stopped" else (None, now)

    def _take_lease(self, report: Report, message: Message, now: float) -> None:
        for key, (label, members, is_message) in message["channels"].items():
            self.picture.channels.setdefault(key, Channel(label, tuple(members), is_message))
        report.counts |= message["counts"]
        for key, marks in message["marks"].items():
            own = report.marks.setdefault(key, {})
            ends = self.picture.channels[key].message  # which have lines of their own
            own |= {count: (rolling, 0 if ends else sites) for count, rolling, sites in marks}
            _forget(own, REMEMBERED)
        for step, states in message["steps"]:
            report.step = step
            report.steps |= {(step, key): (count, roll) for key, count, roll in states}
        _forget(report.steps, REMEMBERED * max(1, len(self.picture.channels)))
        report.waits = [Wait(*values) for values in message["waits"]]
        report.since = {w.number: report.since.get(w.number, now) for w in report.waits}
        report.free, report.foreign = message["free"], message["foreign"]
        if message["marks"] or message["steps"]:
            drop_agreed(self.picture)


def _forget(known: dict[Any, Any], limit: int) -> None:
    """Forget the oldest."""
    for key in list(known)[: max(0, len(known) - limit)]:
        del known[key]

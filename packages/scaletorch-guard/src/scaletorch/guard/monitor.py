"""The monitor: a separate process on rank 0's host that listens to every rank and declares faults.

It needs no torch and shares no interpreter with a rank, so that no rank's lock, crash or stop can
silence it. It loads this module and its imports without their parent packages.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import resource
import selectors
import socket
import sys
import time
import traceback

from .diagnosis import diagnose, with_details
from .facts import MISSED, Channel, Entry, Fault, Need, Picture, Report, Slowness, Wait, news_period

# Not `from . import messages`: the parent package is not importable here.
from .messages import (
    LONGEST,
    Answer,
    Ask,
    Bye,
    Connection,
    End,
    Hello,
    Message,
    News,
    Off,
    Raised,
    Tail,
    Warn,
    Welcome,
)

HELLO = 4096  # largest greeting in bytes
PERIOD = 0.05  # seconds between two diagnoses if no message comes
BRIEF = 0.01  # seconds between two diagnoses if messages come or a fault is suspected
SHARE = 0.05  # largest share of the time for diagnoses
CONFIRM = 0.4  # seconds that ranks get to answer before a fault is declared
WELCOME = 60.0  # seconds within which all ranks must connect
LINGER = 30.0  # seconds that ranks get to disconnect after a verdict
PAUSE = 1.0  # seconds; a longer gap of this process is not counted, since it did not run
REMEMBERED = 64  # marks of a rank in a channel that are kept until they are compared
TAIL = 64  # entries of a channel that are kept
AGAIN = 1.0  # seconds after which an unanswered question is asked again


class Monitor:
    """The server that listens to all ranks, which show a token when they connect.

    Until all ranks are connected, strangers may connect too. A connection that does not begin with
    the token is closed, at the latest once all ranks are there, without any other effect.
    `limits` are `warn` and `patience`, see `Picture`.
    """

    def __init__(self, listener: socket.socket, token: str, size: int, **limits: float) -> None:
        self._picture = new_picture(size, **limits)
        self._reports = self._picture.reports
        self._listener, self._token = listener, token.encode()
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._strangers: dict[Connection, None] = {}  # oldest first
        self._ranks: dict[int, Connection] = {}
        self._warned: dict[tuple[int, ...], float] = {}
        self._suspected: float | None = None  # when a fault was first suspected
        self._over: float | None = None  # when the verdict came, or all had finished
        self._looked = self._busy = 0.0
        self._lost = 0.0  # seconds in which this process did not run
        self._seen = time.monotonic()

    def run(self) -> None:
        """Serve until all ranks have disconnected; a failure of the guard itself ends no rank."""
        begun = time.monotonic()
        try:
            while self._needed(begun):
                ready = self._selector.select(PERIOD if self._suspected is None else BRIEF)
                for key, _ in ready:
                    if key.data is None:
                        self._accept()
                    elif key.data.open:
                        self._hear(key.data)
                self._look(self._now())
        except Exception as error:
            self._turn_off("".join(traceback.format_exception(error)))
        finally:
            self.close()

    def close(self) -> None:
        """Close all sockets."""
        self._stop_listening()
        self._selector.close()
        for rank in self._ranks.values():
            rank.close()

    def _needed(self, begun: float) -> bool:
        if len(self._ranks) < len(self._reports):
            return time.monotonic() - begun < WELCOME
        if self._over is not None and time.monotonic() - self._over > LINGER:
            return False
        return any(rank.open for rank in self._ranks.values())

    def _now(self) -> float:
        """Return the time without the periods in which this process was stopped or starved."""
        now = time.monotonic()
        gap, self._seen = now - self._seen, now
        if gap > PAUSE:
            self._lost += gap
        return now - self._lost

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError:  # out of descriptors: the oldest stranger gives way
            time.sleep(0.001)
            for oldest in [*self._strangers][:1]:
                self._hang_up(oldest)
            return
        stranger = Connection(sock, longest=HELLO)
        self._strangers[stranger] = None
        self._selector.register(stranger, selectors.EVENT_READ, stranger)

    def _hear(self, connection: Connection) -> None:
        received = connection.receive()
        if connection.rank is None and received:
            self._greet(connection, received.pop(0))
        rank = connection.rank
        if rank is None:
            if not connection.open:
                self._hang_up(connection)
            return
        for message in received:
            if isinstance(message, Off):
                self._turn_off(message.why)
            update(self._picture, rank, message, self._now())
        if connection.open:
            return
        self._hang_up(connection)
        if connection.broken:
            self._turn_off(f"{self._reports[rank].label} sent an invalid message")
        update(self._picture, rank, None, self._now())

    def _hang_up(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()

    def _greet(self, stranger: Connection, hello: Message) -> None:
        """Admit a rank that shows the token; welcome all ranks once they are connected."""
        if not (
            isinstance(hello, Hello)
            and hmac.compare_digest(str(hello.token).encode(errors="replace"), self._token)
            and hello.rank in self._reports
            and hello.rank not in self._ranks
        ):
            stranger.open = False
            return
        del self._strangers[stranger]
        stranger.rank, stranger.longest = hello.rank, LONGEST
        self._ranks[hello.rank] = stranger
        report = self._reports[hello.rank]
        report.label, report.pid = str(hello.label), hello.pid
        if len(self._ranks) < len(self._reports):
            return
        self._stop_listening()
        for rank, report in self._reports.items():
            report.heard = self._now()
            self._ranks[rank].send(Welcome())

    def _stop_listening(self) -> None:
        for stranger in list(self._strangers):
            self._hang_up(stranger)
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()

    def _look(self, now: float) -> None:
        """Diagnose the picture, and act on the result."""
        pause = 0.0 if self._suspected is not None else max(BRIEF, self._busy / SHARE)
        all_here = len(self._ranks) == len(self._reports)
        if now - self._looked < pause or self._over is not None or not all_here:
            return
        begun = time.monotonic()
        verdict = diagnose(self._picture, now)
        self._looked, self._busy = now, time.monotonic() - begun
        if isinstance(verdict, Fault):
            if self._confirmed(now):
                self._declare(verdict)
        elif isinstance(verdict, Need):
            self._ask(verdict, now)
        elif isinstance(verdict, Slowness):
            self._warn(verdict)
        elif all(report.end == "finished" for report in self._reports.values()):
            self._tell_all(End())

    def _confirmed(self, now: float) -> bool:
        """Ask all able ranks before declaring a fault; return whether all answered or are late."""
        able = [report for report in self._reports.values() if report.able(now)]
        if self._suspected is None:
            self._suspected = now
            self._ask(Need(tuple(report.rank for report in able)), now, afresh=True)
        known = all(report.answered >= self._suspected for report in able)
        return known or now - self._suspected > CONFIRM

    def _declare(self, fault: Fault) -> None:
        for report in self._reports.values():
            if report.alive and not report.able(self._looked):  # its news is outdated
                report.waits, report.silent = [], True
        self._tell_all(with_details(fault, self._picture))

    def _turn_off(self, why: str) -> None:
        if self._over is None:
            self._tell_all(Off(why))

    def _tell_all(self, message: Message) -> None:
        self._over = time.monotonic()
        for rank in list(self._ranks.values()):
            rank.send(message)

    def _ask(self, need: Need, now: float, *, afresh: bool = False) -> None:
        for rank in need.ranks:
            if new_question(self._reports[rank], now, afresh=afresh):
                self._ranks[rank].send(Ask(now))

    def _warn(self, slowness: Slowness) -> None:
        """Let the first able rank log a warning about slow ranks."""
        if slowness.seconds < self._warned.get(slowness.ranks, 0.0):
            return
        self._warned[slowness.ranks] = 2 * slowness.seconds
        slow, now = [self._reports[rank] for rank in slowness.ranks], self._looked
        stacks = [f"{r.label} is at:\n{r.stack.rstrip()}" for r in slow if r.stack and r.able(now)]
        text = "\n".join([slowness.text, *stacks])
        for rank, report in self._reports.items():
            if report.able(now):
                self._ranks[rank].send(Warn(text))
                return


def serve() -> None:
    """Run the process that `start_monitor` starts; its arguments come through stdin."""
    agreed = json.load(sys.stdin)
    with contextlib.suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    listener = socket.socket(fileno=agreed.pop("listener"))
    Monitor(listener, **agreed).run()


def new_picture(size: int, *, warn: float, patience: float) -> Picture:
    """Return the initial picture of a job of `size` ranks."""
    missed = MISSED * news_period(size)
    reports = {rank: Report(rank, f"rank {rank}", patience=missed) for rank in range(size)}
    return Picture(reports, {}, warn, patience)


def new_question(report: Report, now: float, *, afresh: bool = False) -> bool:
    """Return whether to ask a rank now; not while it may still answer the last question."""
    if report.answered < report.asked and now - report.asked < AGAIN and not afresh:
        return False
    report.asked = now
    return True


def update(picture: Picture, rank: int, message: Message | None, now: float) -> None:
    """Record a message of a rank; None is the end of its connection."""
    report = picture.reports[rank]
    report.heard = now
    match message:
        case News():
            _take_news(picture, report, message, now)
        case Answer():
            report.tails, report.stack = _tails(message.tail), message.stack
            report.answered = max(report.answered, message.asked)
            report.told = report.counts.copy()
        case Raised() if report.alive:
            report.end, report.ended, report.what = "exception", now, message.what
            report.headline, report.tails = message.headline, _tails(message.tail)
        case Bye() if report.alive:
            report.end, report.ended, report.tails = "finished", now, _tails(message.tail)
        case None if report.alive:
            report.end, report.ended = "death", now
            report.what = f"its process {report.pid} ended without a report (killed or aborted)"


def _take_news(picture: Picture, report: Report, news: News, now: float) -> None:
    channels = picture.channels
    for key, (label, members, message) in news.channels.items():
        channels.setdefault(key, Channel(label, tuple(members), message))
    report.counts |= news.counts
    for key, marks in news.marks.items():
        kept = report.marks.setdefault(key, {})
        # The sender and the receiver of a message call from different lines: do not compare them.
        ends = channels[key].message
        kept |= {at: (made, rolling, 0 if ends else sites) for at, made, rolling, sites in marks}
        for oldest in list(kept)[: max(0, len(kept) - REMEMBERED)]:
            del kept[oldest]
    report.step = news.step
    waits = (Wait(*values) for values in news.waits)
    report.waits = [wait for wait in waits if wait.channel in channels]
    report.since = {w.number: report.since.get(w.number, now) for w in report.waits}
    report.free, report.foreign = news.free, news.foreign
    report.last = Entry(*news.last) if news.last else None


def _tails(values: Tail) -> dict[str, dict[int, Entry]]:
    """Return the last `TAIL` entries of each channel, by number."""
    found: dict[str, dict[int, Entry]] = {}
    for entry in (Entry(*fields) for fields in reversed(values)):
        tail = found.setdefault(entry.channel, {})
        if len(tail) < TAIL:
            tail[entry.seq] = entry
    return found

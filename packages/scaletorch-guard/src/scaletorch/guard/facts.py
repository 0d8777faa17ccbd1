"""The guard's data classes, used by all its other files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

PERIOD = 0.25  # seconds between two messages of a rank, with up to 256 ranks
MISSED = 8  # number of missing messages after which a rank counts as silent


def news_period(size: int) -> float:
    """Return the seconds between two messages of each of `size` ranks."""
    return PERIOD * max(1.0, size / 256)


class Channel(NamedTuple):
    """The collectives of one group, or the messages of one sender, receiver, tag and group."""

    label: str  # readable name, such as `tp`
    members: tuple[int, ...]  # global ranks; for messages, the sender and the receiver
    message: bool = False  # whether its calls are messages


class Entry(NamedTuple):
    """One recorded call."""

    seq: int  # its number in the channel, from 0
    check: int  # checksum of everything that must be the same on every member
    text: str  # the call
    site: str  # the line that made the call
    time: float  # seconds since the epoch
    channel: str  # key of the channel


class Wait(NamedTuple):
    """A wait of a thread in a call, or of a device's stream while its host may continue."""

    number: int  # unique among the waits of its rank
    channel: str  # key of the channel
    seq: int  # the call's number in the channel
    seconds: float  # how long it had lasted when it was reported
    stream: bool = False


# The calls made in a channel, and rolling checksums of them and of the lines that made them.
Mark = tuple[int, int, int]


@dataclass(slots=True)
class Report:
    """All that the monitor knows of one rank; times are on the monitor's clock."""

    rank: int
    label: str = ""  # readable name with its coordinates
    pid: int = 0
    # Its calls.
    counts: dict[str, int] = field(default_factory=dict)  # channel -> calls made
    marks: dict[str, dict[str, Mark]] = field(default_factory=dict)  # channel -> moment -> mark
    step: int | None = None  # the last completed step
    tails: dict[str, dict[int, Entry]] = field(default_factory=dict)  # channel -> seq -> entry
    told: dict[str, int] = field(default_factory=dict)  # its counts at its last answer
    last: Entry | None = None  # its last call at its last message
    # Its threads.
    waits: list[Wait] = field(default_factory=list)
    since: dict[int, float] = field(default_factory=dict)  # number of a wait -> first reported
    free: int = 0  # number of threads that have made calls and do not wait
    foreign: bool = False  # whether there are other threads that might make calls
    stack: str = ""  # its main thread's stack at its last answer
    # Its process.
    heard: float = 0.0  # time of its last message
    patience: float = MISSED * PERIOD  # seconds without a message after which it is silent
    asked: float = float("-inf")  # time of the last question to it
    answered: float = float("-inf")  # time of the last question that it has answered
    end: str = ""  # `finished`, `exception` or `death`
    ended: float = 0.0
    what: str = ""  # traceback of its exception, or cause of its death
    headline: str = ""  # its exception on one line
    silent: bool = False  # whether it was silent when the fault was declared

    @property
    def blocked(self) -> list[Wait]:
        """Its waits that block a thread."""
        return [wait for wait in self.waits if not wait.stream]

    @property
    def alive(self) -> bool:
        """True if it has neither finished nor failed nor died."""
        return not self.end

    def tail(self, channel: str) -> dict[int, Entry]:
        """Return the last known entries of a channel, by number."""
        return self.tails.get(channel, {})

    def able(self, now: float) -> bool:
        """Return whether it can answer: it is alive, and has sent a message lately."""
        return self.alive and now - self.heard < self.patience

    def stuck(self, now: float) -> bool:
        """Return whether all its calling threads are known to wait in a call."""
        return self.able(now) and bool(self.blocked) and not self.free


@dataclass(slots=True)
class Picture:
    """All that the monitor knows of the job."""

    reports: dict[int, Report]  # by rank
    channels: dict[str, Channel]  # by key
    warn: float = 0.0  # seconds of waiting after which a warning shows the slow rank
    patience: float = 0.0  # seconds of waiting after which slowness is a fault
    own_lines: set[str] = field(default_factory=set)  # channels whose lines of code differ by rank

    def members(self, channel: str) -> list[Report]:
        """Return the reports of a channel's members."""
        return [self.reports[rank] for rank in self.channels[channel].members]

    def stale(self, channel: str, count: int, now: float) -> tuple[int, ...]:
        """Return the members that have told nothing since the last of their first `count` calls."""
        return tuple(
            report.rank
            for report in self.members(channel)
            if report.able(now)
            and report.told.get(channel, 0) < min(report.counts.get(channel, 0), count)
        )

    def names(self, ranks: Iterable[int]) -> str:
        """Return the labels of ranks."""
        return ", ".join(self.reports[rank].label for rank in ranks)


class Fault(NamedTuple):
    """A verdict: the error that every rank raises."""

    kind: str  # see `RankFaultError`
    ranks: tuple[int, ...]  # the guilty ranks
    text: str  # the first line names the cause; the state of the ranks follows


class Need(NamedTuple):
    """No verdict yet: the monitor must first ask these ranks for their last calls."""

    ranks: tuple[int, ...]


class Slowness(NamedTuple):
    """No fault yet, but others have waited for these ranks for long."""

    ranks: tuple[int, ...]
    seconds: float
    text: str

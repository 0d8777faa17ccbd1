"""The plain records that the guard thinks in; every other file works on these.

A *channel* is a sequence of calls that its members must all make in the same way: the collectives
of one group, or the messages of one sender to one receiver with one tag in one group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

PERIOD = 0.25  # s between two messages of a rank, with up to 256 ranks
MISSED = 8  # so many messages that do not come make a rank silent


def news_period(size: int) -> float:
    """Return the seconds between two messages of each of `size` ranks."""
    return PERIOD * max(1.0, size / 256)


class Channel(NamedTuple):
    """The name and the members of a channel."""

    label: str  # for people, such as `tp`
    members: tuple[int, ...]  # global ranks; of messages, the sender and the receiver
    message: bool = False  # whether it is one of messages


class Entry(NamedTuple):
    """One call in a ledger."""

    seq: int  # its number in the channel, from 0
    check: int  # checksum of all that must be the same on every member
    text: str  # the call, with the strides of tensors that are not contiguous
    site: str  # the line that made it
    time: float  # seconds since the epoch
    state: str  # `issued`, `waiting` or `done`
    channel: str  # key of the channel


class Wait(NamedTuple):
    """A thread that waits in a call, or a stream of a device while its host may do otherwise."""

    number: int  # differs from all other waits of its rank
    channel: str  # key of the channel
    seq: int  # the call's number in the channel
    seconds: float  # how long it had lasted when it was told
    stream: bool = False


@dataclass(slots=True)
class Report:
    """All that is known of one rank; times are on the monitor's clock."""

    rank: int
    label: str = ""  # for people, with its coordinates
    pid: int = 0
    host: int = 0
    # Its calls.
    counts: dict[str, int] = field(default_factory=dict)  # channel -> calls made
    marks: dict[str, dict[str, tuple[int, int, int]]] = field(  # channel -> when -> calls made,
        default_factory=dict  # rolling checksums of them, and of the lines that made them
    )
    step: int | None = None  # the last step that it has ended
    tails: dict[str, dict[int, Entry]] = field(default_factory=dict)  # channel -> seq -> entry
    # Its threads.
    waits: list[Wait] = field(default_factory=list)
    since: dict[int, float] = field(default_factory=dict)  # number of a wait -> first told
    free: int = 0  # how many threads that have made calls do not wait
    foreign: bool = False  # whether other threads live that might make calls
    stack: str = ""  # where its main thread was at its last answer
    # Its life.
    heard: float = 0.0  # when its last message came
    patience: float = MISSED * PERIOD  # seconds without a message after which it is silent
    examined: float = 0.0  # when another rank was last asked to look at its process
    stopped: float | None = None  # since when its process is known to be stopped
    still: float = 0.0  # when it was last seen so
    question: tuple[int, float] | None = None  # number and time of the one under way
    asked: float = float("-inf")  # time of the last question that it has answered
    end: str = ""  # `finished`, `exception` or `death`
    ended: float = 0.0
    what: str = ""  # what it raised, or how it died
    headline: str = ""  # what it raised, on one line
    silent: bool = False  # whether it was silent when the verdict came

    def __post_init__(self) -> None:
        self.label = self.label or f"rank {self.rank}"

    @property
    def blocked(self) -> list[Wait]:
        """Its waits that hold up a thread."""
        return [wait for wait in self.waits if not wait.stream]

    @property
    def alive(self) -> bool:
        """True if it has neither ended nor died."""
        return not self.end

    def tail(self, channel: str) -> dict[int, Entry]:
        """Return the last entries of a channel that are known, by number."""
        return self.tails.get(channel, {})

    def able(self, now: float) -> bool:
        """Return whether it can answer: it lives, is not stopped, and has spoken lately."""
        return self.alive and self.stopped is None and now - self.heard < self.patience


@dataclass(slots=True)
class Picture:
    """All that is known of the job."""

    reports: dict[int, Report]  # by rank
    channels: dict[str, Channel]  # by key
    warn: float = 0.0  # seconds of waiting after which the slow rank is shown
    patience: float = 0.0  # seconds of waiting after which it is an error
    own_lines: set[str] = field(default_factory=set)  # channels whose ranks call from own lines

    def members(self, channel: str) -> list[Report]:
        """Return the reports of a channel's members."""
        return [self.reports[rank] for rank in self.channels[channel].members]

    def names(self, ranks: Iterable[int]) -> str:
        """Return the labels of ranks."""
        return ", ".join(self.reports[rank].label for rank in ranks)


class Fault(NamedTuple):
    """A verdict: the error that is raised on every rank."""

    kind: str  # see `RankFaultError`
    ranks: tuple[int, ...]  # the guilty ones
    text: str  # who did what, in its first line; all else that is known, after it


class Need(NamedTuple):
    """No verdict yet: these ranks must first be asked for their last calls."""

    ranks: tuple[int, ...]


class Slowness(NamedTuple):
    """No fault yet: others wait for these ranks longer than usual."""

    ranks: tuple[int, ...]
    seconds: float
    text: str

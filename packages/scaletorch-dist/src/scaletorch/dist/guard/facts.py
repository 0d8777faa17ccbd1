"""What ranks tell of themselves, as plain data: entries of the ledger, waits, and reports.

A *channel* is a sequence of calls that its members must make alike: the collectives of one group,
or the messages of one sender to one receiver with one tag in one group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

LEASE = 0.25  # s between two words of a rank, with up to 256 ranks
HUSH = 8  # so many words that do not come make a rank silent


def lease_period(size: int) -> float:
    """Return the seconds between two words of a rank of so many."""
    return LEASE * max(1.0, size / 256)


@dataclass(frozen=True, slots=True)
class Channel:
    """What is known of a channel.

    Attributes:
        label: its name for people, such as ``tp``.
        members: global ranks; of messages, the sender and the receiver.
        message: whether it is one of messages.
    """

    label: str
    members: tuple[int, ...]
    message: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One call.

    Attributes:
        seq: its number in the channel, from 0.
        check: checksum of all that its members must have alike.
        text: the call, with the strides of what is not contiguous.
        site: the line that made it.
        time: seconds since the epoch.
        state: ``issued``, ``waiting`` or ``done``.
        channel: key of the channel.
    """

    seq: int
    check: int
    text: str
    site: str
    time: float
    state: str
    channel: str


@dataclass(frozen=True, slots=True)
class Wait:
    """A thread that waits in a call.

    Attributes:
        number: tells this wait apart from the others of its rank.
        channel: where.
        seq: for which of the channel's calls.
        seconds: how long already, when it was told.
    """

    number: int
    channel: str
    seq: int
    seconds: float


class Sign(NamedTuple):
    """What a process looks like from outside.

    Attributes:
        time: when.
        state: as `process_state` has it.
        faults: how often it has touched a new page: who works on data does.
        seconds: of CPU that it has used.
    """

    time: float
    state: str
    faults: int
    seconds: float


@dataclass(slots=True)
class Report:
    """What is known of one rank; times are the monitor's clock.

    Attributes:
        label: the rank's name for people, with its coordinates.
        counts: channel → calls made.
        marks: channel → calls made → rolling checksums of them, and of the lines that made them.
        steps: (step, channel) → (calls made, rolling checksum) at that step's end.
        waits: its threads that wait.
        since: number of a wait → when it was first told.
        free: how many threads that have made calls do not wait.
        foreign: whether other threads live that might make calls.
        heard: when it last told anything.
        hush: seconds without a word after which it is silent.
        signs: of its process, while it is silent.
        step: the last step that it has ended.
        end: ``""`` while it lives; ``finished``, ``exception`` or ``death``.
        ended: when.
        what: what it raised, or how it died.
        headline: what it raised, on one line.
        stopped: since when its process is known to be stopped.
        still: when it was last seen so.
        asked: when it was last asked something that it has answered.
        tails: channel → seq → entry, its last ones as of that answer; None before one.
        stack: where its main thread was at that answer.
        silent: whether it had not been heard of at the verdict.
    """

    rank: int
    label: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    marks: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict)
    steps: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)
    waits: list[Wait] = field(default_factory=list)
    since: dict[int, float] = field(default_factory=dict)
    free: int = 0
    foreign: bool = False
    heard: float = 0.0
    hush: float = HUSH * LEASE
    signs: list[Sign] = field(default_factory=list)
    step: int | None = None
    end: str = ""
    ended: float = 0.0
    what: str = ""
    headline: str = ""
    stopped: float | None = None
    still: float = 0.0
    asked: float = float("-inf")
    tails: dict[str, dict[int, Entry]] | None = None
    stack: str = ""
    silent: bool = False

    def __post_init__(self) -> None:
        self.label = self.label or f"rank {self.rank}"

    @property
    def alive(self) -> bool:
        """Whether it has neither ended nor died."""
        return not self.end

    def able(self, now: float) -> bool:
        """Tell whether it can answer: it lives, is not stopped, and has spoken lately."""
        return self.alive and self.stopped is None and now - self.heard < self.hush


@dataclass(frozen=True, slots=True)
class Fault:
    """A verdict.

    Attributes:
        kind: see `RankFaultError`.
        ranks: the guilty ones.
        headline: who did what.
    """

    kind: str
    ranks: tuple[int, ...]
    headline: str


@dataclass(frozen=True, slots=True)
class Need:
    """Ranks that must be asked for the tails of their ledgers before there can be a verdict."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slowness:
    """Ranks that others wait for longer than usual."""

    ranks: tuple[int, ...]
    seconds: float
    headline: str


@dataclass(slots=True)
class Picture:
    """All that the monitor knows.

    Attributes:
        reports: by rank.
        channels: by key.
        warn: seconds of waiting after which the slow rank is shown.
        patience: seconds of waiting after which it is an error.
        silence: seconds after which a rank that others wait for, and whose process shows no sign
            of life, is one that is stopped.
        own_lines: channels where ranks make the same calls from lines of their own.
    """

    reports: dict[int, Report]
    channels: dict[str, Channel]
    warn: float
    patience: float
    silence: float = 10.0
    own_lines: set[str] = field(default_factory=set)


def entry_to_list(entry: Entry) -> list[Any]:
    """Return an entry as JSON takes it."""
    return [getattr(entry, name) for name in Entry.__slots__]


def entry_from_list(values: list[Any]) -> Entry:
    """Return the entry that `entry_to_list` wrote."""
    return Entry(*values)

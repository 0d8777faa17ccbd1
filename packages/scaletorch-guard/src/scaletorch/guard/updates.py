"""Update the monitor's picture of the job with each message."""

from __future__ import annotations

from itertools import count

from .facts import MISSED, Channel, Entry, Picture, Report, Wait, news_period
from .messages import Answer, Bye, Message, News, Raised, Tail
from .mismatch import drop_agreed

REMEMBERED = 64  # marks of a rank in a channel that are kept until they are compared
TAIL = 64  # entries of a channel that are kept
AGAIN = 1.0  # seconds after which an unanswered question is asked again

_numbers = count(1)


def new_picture(size: int, *, warn: float, patience: float) -> Picture:
    """Return the initial picture of a job of `size` ranks."""
    missed = MISSED * news_period(size)
    reports = {rank: Report(rank, patience=missed) for rank in range(size)}
    return Picture(reports, {}, warn, patience)


def new_question(report: Report, now: float, *, afresh: bool = False) -> int | None:
    """Return the number of a new question to a rank, or None while one is pending."""
    if report.question is not None and now - report.question[1] < AGAIN and not afresh:
        return None
    report.question = next(_numbers), now
    return report.question[0]


def lose(report: Report, what: str, now: float) -> None:
    """Record a rank's death and its cause."""
    report.end, report.ended, report.what = "death", now, what


def update(picture: Picture, rank: int, message: Message, now: float) -> None:
    """Record a message of a rank."""
    report = picture.reports[rank]
    report.heard = now
    match message:
        case News():
            _take_news(picture, report, message, now)
        case Answer():
            report.tails, report.stack = _tails(message.tail), message.stack
            if report.question is not None and report.question[0] == message.number:
                report.asked, report.question = report.question[1], None
        case Raised() if report.alive:
            report.end, report.ended, report.what = "exception", now, message.what
            report.headline, report.tails = message.headline, _tails(message.tail)
        case Bye() if report.alive:
            report.end, report.ended, report.tails = "finished", now, _tails(message.tail)


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
    report.waits = [Wait(*values) for values in news.waits]
    report.since = {w.number: report.since.get(w.number, now) for w in report.waits}
    report.free, report.foreign = news.free, news.foreign
    report.last = Entry(*news.last) if news.last else None
    if news.marks:
        drop_agreed(picture)


def _tails(values: Tail) -> dict[str, dict[int, Entry]]:
    """Return the last `TAIL` entries of each channel, by number."""
    found: dict[str, dict[int, Entry]] = {}
    for entry in (Entry(*fields) for fields in reversed(values)):
        tail = found.setdefault(entry.channel, {})
        if len(tail) < TAIL:
            tail[entry.seq] = entry
    return found

"""Find the first call that the members of a channel did not all make in the same way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from .facts import Channel, Entry, Fault, Mark, Need, Picture, Report, Wait

T = TypeVar("T")

UNDECIDED = "; there is no majority, so it is unknown which of them is right"
END = "the end"  # the moment at which a rank leaves
SETTLE = 1.0  # seconds that a member gets to make a call in which others already differ
ENOUGH = 8  # calls that must be known before a swap is reported
PLENTY = 16  # calls after which a channel without a swap is ignored
RARE = 4  # at most one call in this many may come from different lines in a swap


def find_mismatch(picture: Picture, now: float) -> Fault | None:
    """Return the earliest difference among the known tails, or None."""
    found = {
        min(entry.time for entry in entries.values()): (key, entries)
        for key in picture.channels
        if (entries := _differing(key, picture)) and _settled(key, entries, picture, now)
    }
    return _fault(*found[min(found)], picture) if found else None


def _differing(key: str, picture: Picture) -> dict[int, Entry]:
    """Return the members' entries for the first call that is not the same for all."""
    tails = {r.rank: r.tail(key) for r in picture.members(key)}
    for seq in sorted({seq for tail in tails.values() for seq in tail}):
        entries = {rank: tail[seq] for rank, tail in tails.items() if seq in tail}
        if len({entry.check for entry in entries.values()}) > 1:
            return entries
    return {}


def _settled(key: str, entries: dict[int, Entry], picture: Picture, now: float) -> bool:
    """Return whether every member that may still make the call has made it, or had time to."""
    missing = [report for report in picture.members(key) if report.rank not in entries]
    if not any(report.alive and not report.blocked for report in missing):
        return True
    seq = next(iter(entries.values())).seq
    since = [
        picture.reports[rank].since[wait.number]
        for rank in entries
        for wait in picture.reports[rank].waits
        if (wait.channel, wait.seq) == (key, seq)
    ]
    return not since or now - min(since) > SETTLE


def _fault(key: str, entries: dict[int, Entry], picture: Picture) -> Fault:
    channel, checks = picture.channels[key], [entry.check for entry in entries.values()]
    usual, seq = most_common(checks), next(iter(entries.values())).seq
    if usual is None:  # let sibling groups, such as another tp group, decide
        usual = most_common(checks + _siblings(key, channel, seq, picture))
        usual = usual if usual in checks else None
    guilty = tuple(rank for rank, entry in entries.items() if entry.check != usual)
    place = f"call {seq + 1} in {channel.label}"
    if usual is None:
        calls = "; ".join(_says(picture.reports[rank], entries[rank]) for rank in guilty)
        return Fault("mismatch", guilty, f"{place} is not the same: {calls}{UNDECIDED}")
    rank, other = guilty[0], next(r for r, entry in entries.items() if entry.check == usual)
    headline = (
        f"{_says(picture.reports[rank], entries[rank])}, as {place}, "
        f"where {_says(picture.reports[other], entries[other])}"
    )
    return Fault("mismatch", guilty, headline)


def _siblings(key: str, channel: Channel, seq: int, picture: Picture) -> list[int]:
    return [
        report.tails[other][seq].check
        for other, sibling in picture.channels.items()
        if other != key and sibling.label == channel.label
        for report in picture.members(other)
        if seq in report.tail(other)
    ]


def _says(report: Report, entry: Entry) -> str:
    return f"{report.label} calls {entry.text} at {entry.site}"


def as_others(picture: Picture, rank: int, wait: Wait) -> bool:
    """Return whether a rank made as many calls in each group as most ranks before a collective.

    Groups of one name, such as each rank's own tp, count as one.
    """
    label = picture.channels[wait.channel].label
    before = {
        other: _made_before(picture, other, key, wait.seq)
        for key, channel in picture.channels.items()
        if channel.label == label and not channel.message
        for other in channel.members
        if wait.seq in picture.reports[other].tail(key)
    }
    usual = most_common(list(before.values())) if len(before) > 1 else None
    return rank in before and before[rank] == usual


def _made_before(picture: Picture, rank: int, key: str, seq: int) -> tuple[tuple[str, int], ...]:
    """Return the number of collectives that a rank had made before a call, by group name."""
    made = picture.reports[rank].tails
    time = made[key][seq].time
    counts: Counter[str] = Counter()
    for other, tail in made.items():
        channel = picture.channels.get(other)
        if channel is not None and not channel.message:
            before = (seq for seq, entry in tail.items() if entry.time < time)
            counts[channel.label] += max(before, default=-1) + 1
    return tuple(sorted(counts.items()))


def most_common(values: Sequence[T]) -> T | None:
    """Return the most frequent value, or None on a tie."""
    ordered = Counter(values).most_common(2)
    if len(ordered) > 1 and ordered[0][1] == ordered[1][1]:
        return None
    return ordered[0][0]


def find_disagreement(picture: Picture, now: float) -> Fault | Need | None:
    """Compare the members' checksums of calls and source lines; ask for the entries if they differ.

    Checksums that are equal on all members are dropped, since they may be very many.
    """
    for key, channel in picture.channels.items():
        members = picture.members(key)
        other_lines = 0  # calls up to the last mark before which lines differ
        for moment, marks in _marks(key, members):
            calls = {rank: mark[:2] for rank, mark in marks.items()}
            if moment == END:  # a rank that has made no call there has no mark
                calls = {r.rank: (0, 0) for r in members if r.end == "finished"} | calls
            count = max(count for count, _ in calls.values())
            if len(set(calls.values())) > 1:
                stale = picture.stale(key, count, now)
                return Need(stale) if stale else _disagreement(channel, moment, calls, picture)
            if len(marks) < len(members):
                continue
            if key not in picture.own_lines and len({sites for *_, sites in marks.values()}) > 1:
                other_lines = count
                continue
            for report in members:
                del report.marks[key][moment]
        if other_lines:
            stale = picture.stale(key, other_lines, now)
            verdict = Need(stale) if stale else _swap(key, picture)
            if verdict is not None:
                return verdict
    return None


def _marks(key: str, members: list[Report]) -> list[tuple[str, dict[int, Mark]]]:
    """Return the ranks' marks in a channel at each moment, earliest first."""
    found: dict[str, dict[int, Mark]] = {}
    for report in members:
        for moment, mark in report.marks.get(key, {}).items():
            found.setdefault(moment, {})[report.rank] = mark
    return sorted(found.items(), key=lambda item: min(item[1].values()))


def _disagreement(
    channel: Channel, moment: str, sums: dict[int, tuple[int, int]], picture: Picture
) -> Fault:
    """Name the ranks that differ; the calls themselves are missing, or too old for the tails."""
    usual = most_common(list(sums.values()))
    guilty = tuple(rank for rank, state in sums.items() if state != usual)
    counts = ", ".join(
        f"{picture.reports[rank].label} has made {count}" for rank, (count, _) in sums.items()
    )
    if len({count for count, _ in sums.values()}) == 1:
        counts = f"{picture.names(guilty)} made other calls"
    counts += "" if usual is not None else UNDECIDED
    return Fault("mismatch", guilty, f"calls in {channel.label} differ by {moment}: {counts}")


def _swap(key: str, picture: Picture) -> Fault | None:
    """Return the fault of ranks that make a few equal calls in another order, or None.

    Ranks may legitimately make one call from different lines, as a source and its receivers do. But
    if their lines agree except that they make a few calls in another order, their data is mixed up.
    A channel in which lines differ in another way is ignored from then on.
    """
    tails = {report.rank: report.tail(key) for report in picture.members(key)}
    seen = sorted(set.intersection(*map(set, tails.values())))
    if len(seen) >= PLENTY:
        picture.own_lines.add(key)
    differing = [seq for seq in seen if len({tail[seq].site for tail in tails.values()}) > 1]
    if not differing or len(seen) < max(ENOUGH, RARE * len(differing)):
        return None
    lines = {rank: tuple(tail[seq].site for seq in differing) for rank, tail in tails.items()}
    usual = most_common(list(lines.values()))
    other_lines = len({tuple(sorted(sites)) for sites in lines.values()}) > 1
    if other_lines or (usual is None and len(tails) > 2):
        return None
    guilty = tuple(rank for rank, sites in lines.items() if sites != usual)
    other = next(rank for rank, sites in lines.items() if sites != lines[guilty[0]])
    one, two = (
        f"{picture.reports[rank].label} makes "
        + ", then ".join(f"{tails[rank][seq].text} at {tails[rank][seq].site}" for seq in differing)
        for rank in (guilty[0], other)
    )
    place = f"from call {differing[0] + 1} in {picture.channels[key].label}"
    headline = f"equal calls are made in another order, {place}: {one}, where {two}"
    return Fault("mismatch", guilty, headline + (UNDECIDED if usual is None else ""))

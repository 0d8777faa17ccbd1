"""Find the first call that the members of a channel did not all make in the same way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from .facts import Channel, Entry, Fault, Need, Picture, Report, Wait

T = TypeVar("T")

UNDECIDED = "; there is no majority, so it is unknown which of them is right"
END = "the end"  # the moment at which a rank leaves
SETTLE = 1.0  # seconds that a member gets to make a call in which others already differ
ENOUGH = 8  # calls that must be known before a swap is reported
PLENTY = 16  # calls after which a channel without a swap is ignored
RARE = 4  # at most one call in this many may come from different lines in a swap


def find_mismatch(picture: Picture, now: float) -> Fault | None:
    """Return the earliest difference among the known tails, or None."""
    found: list[tuple[float, Fault]] = []
    for key, channel in picture.channels.items():
        entries = _differing(key, picture)
        if entries and _settled(key, entries, picture, now):
            fault = _fault(key, channel, entries, picture)
            found.append((min(entry.time for entry in entries.values()), fault))
    return min(found, key=lambda item: item[0])[1] if found else None


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


def _fault(key: str, channel: Channel, entries: dict[int, Entry], picture: Picture) -> Fault:
    checks = [entry.check for entry in entries.values()]
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


def drop_agreed(picture: Picture) -> None:
    """Drop the checksums that are equal on all members, since they may be very many."""
    for key in picture.channels:
        members = picture.members(key)
        marks = [report.marks.get(key, {}) for report in members]
        compared = 2 if key in picture.own_lines else 3  # without the checksum of lines, or with it
        for moment in set(marks[0]).intersection(*marks[1:]):
            sums = {mark[moment][:compared] for mark in marks}
            if len(sums) == 1:
                for mark in marks:
                    del mark[moment]


def find_disagreement(picture: Picture, now: float) -> Fault | Need | None:
    """Compare the ranks' checksums; ask for the entries if they differ."""
    for key, channel in picture.channels.items():
        members = picture.members(key)
        for moment, sums in _sums(key, members):
            if moment == END:  # a rank that has made no call there has no mark
                sums = {r.rank: (0, 0) for r in members if r.end == "finished"} | sums
            if len(set(sums.values())) < 2:
                continue
            stale = tuple(r.rank for r in members if r.able(now) and not covers(r, key, sums))
            if stale:
                return Need(stale)
            return _disagreement(channel, moment, sums, picture)
    return None


def _sums(key: str, members: list[Report]) -> list[tuple[str, dict[int, tuple[int, int]]]]:
    """Return a channel's marks, earliest first, each with the ranks' counts and checksums."""
    found: dict[str, dict[int, tuple[int, int]]] = {}
    for report in members:
        for moment, (count, rolling, _) in report.marks.get(key, {}).items():
            found.setdefault(moment, {})[report.rank] = (count, rolling)
    return sorted(found.items(), key=lambda item: min(item[1].values()))


def covers(report: Report, key: str, sums: dict[int, tuple[int, int]]) -> bool:
    """Return whether a rank's tail reaches the call count of its mark."""
    if report.rank not in sums or not sums[report.rank][0]:
        return True
    return max(report.tail(key), default=-2) >= sums[report.rank][0] - 1


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


def find_swap(picture: Picture, now: float) -> Fault | Need | None:
    """Compare the source lines of calls that are otherwise the same.

    Ranks may legitimately make one call from different lines, as a source and its receivers do. But
    if their lines agree except that they make a few calls in another order, their data is mixed up.
    A channel in which lines differ in another way is ignored from then on.
    """
    for key, channel in picture.channels.items():
        if channel.message or key in picture.own_lines:
            continue
        members = picture.members(key)
        marks = [report.marks.get(key, {}) for report in members]
        shared = set(marks[0]).intersection(*marks[1:])
        if all(len({mark[moment] for mark in marks}) == 1 for moment in shared):
            continue
        sums = {r.rank: mark[:2] for r in members for mark in list(r.marks[key].values())[-1:]}
        stale = tuple(r.rank for r in members if r.able(now) and not covers(r, key, sums))
        if stale:
            return Need(stale)
        tails = {r.rank: r.tail(key) for r in members}
        seen = set.intersection(*map(set, tails.values()))
        fault = _swap(channel, picture, tails, sorted(seen))
        if fault is not None:
            return fault
        if len(seen) >= PLENTY:
            picture.own_lines.add(key)
    return None


def _swap(
    channel: Channel, picture: Picture, tails: dict[int, dict[int, Entry]], seen: list[int]
) -> Fault | None:
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

    def describe(rank: int) -> str:
        calls = ", then ".join(
            f"{tails[rank][seq].text} at {site}"
            for seq, site, one, two in zip(
                differing, lines[rank], lines[guilty[0]], lines[other], strict=True
            )
            if one != two
        )
        return f"{picture.reports[rank].label} makes {calls}"

    headline = (
        f"equal calls are made in another order, from call {differing[0] + 1} in {channel.label}: "
        f"{describe(guilty[0])}, where {describe(other)}{'' if usual is not None else UNDECIDED}"
    )
    return Fault("mismatch", guilty, headline)

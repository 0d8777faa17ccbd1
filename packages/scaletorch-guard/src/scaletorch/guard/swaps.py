"""Calls that look the same, which a rank makes in another order: from other lines."""

from __future__ import annotations

from collections import Counter

from .facts import Channel, Entry, Fault, Need, Picture
from .mismatch import NOBODY, covers, most_common

ENOUGH = 8  # calls that must be seen
PLENTY = 16  # calls after which it is known whether lines differ by habit
RARE = 4  # of so many calls at most one may be from another line: more of them is a habit


def find_swap(picture: Picture, now: float) -> Fault | Need | None:
    """Compare the lines that calls come from, when the calls themselves are the same.

    Ranks may well make one call from lines of their own, as a source and its receivers do. But that
    ranks whose lines agree make the same few calls, once, in another order is a mistake: their
    data is mixed up. A channel in which lines differ otherwise is not looked at again.
    """
    for key, channel in picture.channels.items():
        if channel.message or key in picture.own_lines or not _lines_differ(key, picture):
            continue
        members = picture.members(key)
        said = {r.rank: (count, 0) for r in members for count in list(r.marks[key])[-1:]}
        stale = tuple(r.rank for r in members if r.able(now) and not covers(r, key, said))
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


def _lines_differ(key: str, picture: Picture) -> bool:
    marks = [report.marks.get(key, {}) for report in picture.members(key)]
    return any(
        len({mark[count] for mark in marks}) > 1 for count in set(marks[0]).intersection(*marks[1:])
    )


def _swap(
    channel: Channel, picture: Picture, tails: dict[int, dict[int, Entry]], seen: list[int]
) -> Fault | None:
    differing = [seq for seq in seen if len({tail[seq].site for tail in tails.values()}) > 1]
    if not differing or len(seen) < max(ENOUGH, RARE * len(differing)):
        return None
    usual = {seq: most_common([tail[seq].site for tail in tails.values()]) for seq in differing}
    if None not in usual.values():
        lines = {seq: str(site) for seq, site in usual.items()}
    elif len(tails) == 2:
        lines = {seq: next(iter(tails.values()))[seq].site for seq in differing}
    else:
        return None
    odd = {rank: _otherwise(tail, lines) for rank, tail in tails.items()}
    odd = {rank: places for rank, places in odd.items() if places}
    for rank, places in odd.items():
        if Counter(tails[rank][s].site for s in places) != Counter(lines[s] for s in places):
            return None
    return _fault(channel, picture, tails, odd, sure=None not in usual.values())


def _otherwise(tail: dict[int, Entry], lines: dict[int, str]) -> list[int]:
    return [seq for seq, line in lines.items() if tail[seq].site != line]


def _fault(
    channel: Channel,
    picture: Picture,
    tails: dict[int, dict[int, Entry]],
    odd: dict[int, list[int]],
    *,
    sure: bool,
) -> Fault:
    rank, places = next(iter(odd.items()))
    other = next(r for r in tails if r not in odd)

    def said(who: int) -> str:
        calls = ", then ".join(
            f"{tails[who][seq].text} at {tails[who][seq].site}" for seq in places
        )
        return f"{picture.reports[who].label} makes {calls}"

    headline = (
        f"look-alike calls come in another order, from call {places[0] + 1} in {channel.label}: "
        f"{said(rank)}, where {said(other)}{'' if sure else NOBODY}"
    )
    guilty = tuple(odd) if sure else tuple(channel.members)
    return Fault("mismatch", guilty, headline)

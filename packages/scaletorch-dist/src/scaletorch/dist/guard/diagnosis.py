"""What is wrong, from what the ranks have told: pure functions over plain data.

What can be proved is a fault at once: an exception, calls that differ, a death, a rank that left
while others wait for it, a stopped process, ranks that wait for one another in a circle. That a
rank is slow proves nothing: it is shown after a while, and a fault only after much longer.
"""

from __future__ import annotations

from .facts import Fault, Need, Picture, Report, Slowness, Wait
from .mismatch import as_others, find_disagreement, find_mismatch, most_common

STALL = 0.2  # s of waiting after which calls are compared
ASKING = 0.5  # s that a slow rank has to tell where it is
FREEZE = 1.0  # s that a process must be seen stopped
FOREIGN = 5.0  # s that a circle must last where other threads might still make a call

Verdict = Fault | Need | Slowness | None


def diagnose(picture: Picture, now: float) -> Verdict:
    """Return the first fault, or what to ask, or who is slow, or None.

    Args:
        picture: what the ranks have told.
        now: the time, on the clock of the reports.
    """
    for look in (_exception, find_mismatch, _death, _left, _stopped):
        verdict = look(picture, now)
        if verdict is not None:
            return verdict
    return (
        find_disagreement(picture)
        or _unequal_ends(picture)
        or _stalled(picture, now)
        or _circle(picture, now)
        or _slow(picture, now)
    )


def _exception(picture: Picture, now: float) -> Verdict:
    raised = [report for report in picture.reports.values() if report.end == "exception"]
    if not raised:
        return None
    first = min(raised, key=lambda report: report.ended)
    headline = f"{first.label} raised {first.what.strip().rpartition(chr(10))[2]}"
    return Fault("exception", (first.rank,), headline)


def _death(picture: Picture, now: float) -> Verdict:
    dead = [report for report in picture.reports.values() if report.end == "death"]
    if not dead:
        return None
    first = min(dead, key=lambda report: report.ended)
    return Fault("death", (first.rank,), f"{first.label} died: {first.what}")


def _left(picture: Picture, now: float) -> Verdict:
    for report, wait, missing in _waits(picture):
        gone = [other for other in missing if other.end == "finished"]
        if not gone:
            continue
        channel = picture.channels[wait.channel]
        if len(gone) > len(channel.members) / 2:
            headline = (
                f"{report.label} waits in call {wait.seq + 1} of {channel.label}, but most ranks "
                f"have left after {gone[0].counts.get(wait.channel, 0)} calls there"
            )
            there = set(channel.members) - {other.rank for other in gone}
            return Fault("left", tuple(sorted(there)), headline)
        who = ", ".join(other.label for other in gone)
        headline = (
            f"{who} left after {gone[0].counts.get(wait.channel, 0)} calls in {channel.label}, "
            f"while {report.label} waits in call {wait.seq + 1} there"
        )
        return Fault("left", tuple(other.rank for other in gone), headline)
    return None


def _stopped(picture: Picture, now: float) -> Verdict:
    for report in picture.reports.values():
        if report.alive and report.stopped is not None and now - report.stopped >= FREEZE:
            headline = f"{report.label} is stopped (SIGSTOP, or a debugger)"
            return Fault("stopped", (report.rank,), headline)
    return None


def _unequal_ends(picture: Picture) -> Fault | None:
    """Compare how many collectives ranks have made, when all have finished."""
    if any(report.end != "finished" for report in picture.reports.values()):
        return None
    for key, channel in picture.channels.items():
        counts = {rank: picture.reports[rank].counts.get(key, 0) for rank in channel.members}
        if channel.message or len(set(counts.values())) == 1:
            continue
        usual = most_common(list(counts.values()))
        guilty = tuple(rank for rank, count in counts.items() if count != usual)
        said = ", ".join(f"{picture.reports[r].label} has made {n}" for r, n in counts.items())
        return Fault("mismatch", guilty, f"calls are missing in {channel.label}: {said}")
    return None


def _stalled(picture: Picture, now: float) -> Need | None:
    """Ask for the calls that members have made where somebody has begun to wait."""
    stale: set[int] = set()
    seen: set[tuple[str, int]] = set()
    for report, wait, _ in _waits(picture):
        if now - report.since[wait.number] < STALL or (wait.channel, wait.seq) in seen:
            continue
        seen.add((wait.channel, wait.seq))
        for rank in picture.channels[wait.channel].members:
            other = picture.reports[rank]
            tail = (other.tails or {}).get(wait.channel, {})
            due = min(other.counts.get(wait.channel, 0) - 1, wait.seq)
            if other.alive and max(tail, default=-1) < due:
                stale.add(rank)
    return Need(tuple(sorted(stale))) if stale else None


def _circle(picture: Picture, now: float) -> Verdict:
    """Find ranks that wait for one another, all at one moment: nothing can free them."""
    stuck = {rank for rank, report in picture.reports.items() if _blocked(report)}
    waits = _waits(picture)
    while True:
        free = {
            report.rank
            for report, _, missing in waits
            if report.rank in stuck and not any(other.rank in stuck for other in missing)
        }
        if not free:
            break
        stuck -= free
    if not stuck:
        return None
    begun = max(picture.reports[rank].since[w.number] for rank in stuck for w in _of(picture, rank))
    # Who answers a question that was asked after all had begun has waited at that moment.
    if any(picture.reports[rank].asked <= begun for rank in stuck):
        return Need(tuple(sorted(stuck)))
    if any(picture.reports[rank].foreign for rank in stuck) and now - begun < FOREIGN:
        return None
    return _name_circle(picture, stuck)


def _name_circle(picture: Picture, stuck: set[int]) -> Fault:
    edges: dict[int, set[int]] = {rank: set() for rank in stuck}
    for report, _, missing in _waits(picture):
        if report.rank in stuck:
            edges[report.rank] |= {other.rank for other in missing}
    core = {rank for rank in stuck if rank in _reachable(rank, edges)}
    waits = {rank: _of(picture, rank)[0] for rank in core}
    messages = any(picture.channels[wait.channel].message for wait in waits.values())
    odd = set() if messages else {r for r in core if not as_others(picture, r, waits[r])}
    guilty = sorted(odd or core)
    names = ", ".join(picture.reports[rank].label for rank in sorted(core))
    if len(guilty) < len(core):
        who = ", ".join(picture.reports[rank].label for rank in guilty)
        names = f"{names}; {who} came there by other calls than the rest"
    return Fault("cycle", tuple(guilty), f"ranks wait for one another and none can go on: {names}")


def _reachable(start: int, edges: dict[int, set[int]]) -> set[int]:
    seen: set[int] = set()
    todo = list(edges[start])
    while todo:
        rank = todo.pop()
        if rank not in seen and rank in edges:
            seen.add(rank)
            todo += edges[rank]
    return seen


def _slow(picture: Picture, now: float) -> Verdict:
    longest: dict[int, float] = {}
    for report, wait, missing in _waits(picture):
        seconds = now - report.since[wait.number]
        if seconds >= min(picture.warn, picture.patience):
            for other in missing:
                if other.alive and not _blocked(other):
                    longest[other.rank] = max(seconds, longest.get(other.rank, 0.0))
    if not longest:
        return None
    seconds = max(longest.values())
    ranks = tuple(sorted(longest))
    silent = tuple(r for r in ranks if now - picture.reports[r].asked > seconds)
    if silent and seconds < min(picture.warn, picture.patience) + ASKING:
        return Need(silent)
    who = ", ".join(picture.reports[rank].label for rank in ranks)
    if seconds >= picture.patience:
        return Fault("slow", ranks, f"{who} has not come for {seconds:.1f} s")
    return Slowness(ranks, seconds, f"others wait for {who} since {seconds:.1f} s")


def _blocked(report: Report) -> bool:
    """Tell whether all threads of a rank that make calls wait in one."""
    return report.alive and bool(report.waits) and not report.free


def _of(picture: Picture, rank: int) -> list[Wait]:
    return [wait for wait in picture.reports[rank].waits if wait.channel in picture.channels]


def _waits(picture: Picture) -> list[tuple[Report, Wait, list[Report]]]:
    """Return every wait of a living rank, with the members that have not come to that call."""
    missing: dict[tuple[str, int], list[Report]] = {}  # thousands may wait in one call
    found = []
    for report in picture.reports.values():
        for wait in _of(picture, report.rank) if report.alive and report.waits else ():
            place = (wait.channel, wait.seq)
            if place not in missing:
                missing[place] = missing_members(picture, wait)
            found.append((report, wait, missing[place]))
    return found


def missing_members(picture: Picture, wait: Wait) -> list[Report]:
    """Return the ranks that have not made the call that somebody waits in."""
    members = [picture.reports[rank] for rank in picture.channels[wait.channel].members]
    return [report for report in members if report.counts.get(wait.channel, 0) <= wait.seq]

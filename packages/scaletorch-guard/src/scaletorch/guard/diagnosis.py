"""Diagnose a job from the reports of its ranks: pure functions on plain data.

Anything that can be proved is a fault at once: an exception, calls that differ, a death, a rank
that left while others wait for it, ranks that wait for one another in a cycle. A slow rank proves
nothing: it causes a warning after a while, and a fault only much later.
"""

from __future__ import annotations

from .facts import Fault, Need, Picture, Report, Slowness, Wait
from .mismatch import as_others, find_disagreement, find_mismatch

STALL = 0.2  # seconds of waiting after which calls are compared
ASKING = 0.5  # seconds that a slow rank gets to report where it is
SHOWN = 16  # ranks listed in a fault's text
FOREIGN = 5.0  # seconds that a cycle must last if other threads might still make a call

Verdict = Fault | Need | Slowness | None


def diagnose(picture: Picture, now: float) -> Verdict:
    """Return the first fault, else the ranks to ask, else the slow ranks, or None."""
    return (
        _ended(picture, "exception")
        or find_mismatch(picture, now)
        or _ended(picture, "death")
        or _left(picture)
        or find_disagreement(picture, now)
        or _stalled(picture, now)
        or _circle(picture, now)
        or _slow(picture, now)
    )


def _ended(picture: Picture, end: str) -> Fault | None:
    """Return the fault of the first rank that ended in the given way, or None."""
    ended = [report for report in picture.reports.values() if report.end == end]
    if not ended:
        return None
    first = min(ended, key=lambda report: report.ended)
    what = f"raised {first.headline}" if end == "exception" else f"died: {first.what}"
    return Fault(end, (first.rank,), f"{first.label} {what}")


def _left(picture: Picture) -> Fault | None:
    """Return the fault of ranks that left while others wait for them; most ranks are right."""
    for report, wait, missing in _waits(picture):
        gone = [other for other in missing if other.end == "finished"]
        if not gone:
            continue
        channel = picture.channels[wait.channel]
        guilty = {other.rank for other in gone}
        if len(guilty) > len(channel.members) / 2:
            guilty = set(channel.members) - guilty
        headline = (
            f"{picture.names(other.rank for other in gone)} left after "
            f"{gone[0].counts.get(wait.channel, 0)} calls in {channel.label}, while {report.label} "
            f"waits in call {wait.seq + 1} there"
        )
        return Fault("left", tuple(sorted(guilty)), headline)
    return None


def _stalled(picture: Picture, now: float) -> Need | None:
    """Ask the members of a channel for their last calls once a rank has waited in it a while."""
    places = {
        (wait.channel, wait.seq)
        for report, wait, _ in _waits(picture)
        if now - report.since[wait.number] >= STALL
    }
    stale = {rank for key, seq in places for rank in picture.stale(key, seq + 1, now)}
    return Need(tuple(sorted(stale))) if stale else None


def _circle(picture: Picture, now: float) -> Verdict:
    """Find ranks that wait for one another at the same time, so that none can go on."""
    needs: dict[int, list[set[int]]] = {}  # rank -> for each of its waits, the ranks that it needs
    for report, wait, missing in _waits(picture):
        if not wait.stream and report.stuck(now):
            needs.setdefault(report.rank, []).append({other.rank for other in missing})
    stuck = set(needs)
    while free := {rank for rank in stuck if any(map(stuck.isdisjoint, needs[rank]))}:
        stuck -= free
    # Ranks that none of the others needs only wait for the cycle.
    while idle := stuck - {other for rank in stuck for need in needs[rank] for other in need}:
        stuck -= idle
    if not stuck:
        return None
    reports = [picture.reports[rank] for rank in sorted(stuck)]
    begun = max(report.since[wait.number] for report in reports for wait in report.blocked)
    # Each rank must answer a question sent after the last of the waits had begun. If its wait
    # still lasts, it was waiting at that moment; so all ranks waited at the same time.
    if any(report.answered <= begun for report in reports):
        return Need(tuple(sorted(stuck)))
    if any(report.foreign for report in reports) and now - begun < FOREIGN:
        return None
    return _name_circle(picture, reports)


def _name_circle(picture: Picture, reports: list[Report]) -> Fault:
    waits = {report.rank: report.blocked[0] for report in reports}
    messages = any(picture.channels[wait.channel].message for wait in waits.values())
    odd = [r for r, wait in waits.items() if not (messages or as_others(picture, r, wait))]
    guilty, names = odd or [*waits], picture.names(waits)
    if len(guilty) < len(waits):
        names = f"{names}; {picture.names(guilty)} made other calls before than the other ranks"
    return Fault("cycle", tuple(guilty), f"ranks wait for one another and none can go on: {names}")


def _slow(picture: Picture, now: float) -> Verdict:
    longest: dict[int, float] = {}
    for report, wait, missing in _waits(picture):
        seconds = now - report.since[wait.number]
        if seconds >= min(picture.warn, picture.patience):
            for other in missing:
                if other.alive and not other.stuck(now):
                    longest[other.rank] = max(seconds, longest.get(other.rank, 0.0))
    if not longest:
        return None
    seconds = max(longest.values())
    ranks = tuple(sorted(longest))
    slow = [picture.reports[rank] for rank in ranks]
    unasked = tuple(r.rank for r in slow if now - r.answered > seconds and r.able(now))
    if unasked and seconds < min(picture.warn, picture.patience) + ASKING:
        return Need(unasked)
    who = picture.names(ranks)
    why = "".join(
        f"; {r.label} has sent nothing for {now - r.heard:.1f} s: its process is stopped, C code "
        "or a regular expression holds its interpreter's lock, or its machine cannot be reached"
        for r in slow
        if not r.able(now)
    )
    if seconds >= picture.patience:
        return Fault("slow", ranks, f"{who} has kept other ranks waiting for {seconds:.1f} s{why}")
    return Slowness(ranks, seconds, f"other ranks have waited for {who} for {seconds:.1f} s{why}")


def _waits(picture: Picture) -> list[tuple[Report, Wait, list[Report]]]:
    """Return every wait of a live rank, with the members that have not made that call."""
    missing: dict[tuple[str, int], list[Report]] = {}  # cached: thousands may wait in a call
    found = []
    for report in picture.reports.values():
        for wait in report.waits if report.alive else ():
            place = (wait.channel, wait.seq)
            if place not in missing:
                missing[place] = missing_members(picture, wait)
            found.append((report, wait, missing[place]))
    return found


def missing_members(picture: Picture, wait: Wait) -> list[Report]:
    """Return the reports of the ranks that have not made the call of a wait."""
    members = picture.members(wait.channel)
    return [report for report in members if report.counts.get(wait.channel, 0) <= wait.seq]


def with_details(fault: Fault, picture: Picture) -> Fault:
    """Return the fault with the state of the ranks added to its text, guilty ranks first."""
    guilty = [picture.reports[rank] for rank in fault.ranks if rank in picture.reports]
    others = [report for report in picture.reports.values() if report.rank not in fault.ranks]
    lines = [fault.text]
    lines += [f"  {_doing(report, picture)}" for report in [*guilty, *others][:SHOWN]]
    if len(picture.reports) > SHOWN:
        lines.append(f"  … and {len(picture.reports) - SHOWN} ranks more")
    for report in guilty:
        if report.end == "exception":
            lines.append(f"{report.label} raised:\n{report.what.rstrip()}")
        elif fault.kind == "slow" and report.stack and not report.silent:
            lines.append(f"{report.label} was at:\n{report.stack.rstrip()}")
    return fault._replace(text="\n".join(lines))


def _doing(report: Report, picture: Picture) -> str:
    """Return one line on the state of a rank."""
    step = "" if report.step is None else f" after step {report.step}"
    if report.end == "finished":
        return f"{report.label} has finished{step}{_last(report)}"
    if report.end:
        return f"{report.label} is gone{step}{_last(report)}"
    if report.silent:
        return f"{report.label} does not answer{_last(report)}"
    waits = []
    for wait in report.waits:
        entry = report.tail(wait.channel).get(wait.seq)
        what = "a call" if entry is None else f"{entry.text} at {entry.site}"
        missing = ", ".join(str(m.rank) for m in missing_members(picture, wait)[:8])
        label = picture.channels[wait.channel].label
        lacks = f", which rank(s) {missing} did not make" if missing else ""
        where = "on its device's stream in" if wait.stream else "in"
        waits.append(
            f"{where} {what}, call {wait.seq + 1} in {label} ({wait.seconds:.1f} s){lacks}"
        )
    if waits:
        return f"{report.label} waits{step} {'; and '.join(waits)}"
    return f"{report.label} is in no recorded call{step}{_last(report)}"


def _last(report: Report) -> str:
    """Return the last call of a rank as text."""
    entries = [entry for tail in report.tails.values() for entry in tail.values()]
    entries += [report.last] if report.last is not None else []
    if not entries:
        return ""
    last = max(entries, key=lambda entry: entry.time)
    return f"; its last call was {last.text} at {last.site}"

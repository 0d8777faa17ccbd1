"""The text of a fault: who did what, where each rank waits, and what it raised."""

from __future__ import annotations

from .diagnosis import missing_members
from .facts import Fault, Picture, Report

SHOWN = 16  # ranks that are shown one by one


def with_details(fault: Fault, picture: Picture, folder: str) -> Fault:
    """Return the fault with all that is known in its text, guilty ranks first."""
    guilty = [picture.reports[rank] for rank in fault.ranks if rank in picture.reports]
    others = [report for report in picture.reports.values() if report.rank not in fault.ranks]
    lines = [fault.text]
    for report in [*guilty, *others][:SHOWN]:
        lines.append(f"  {_doing(report, picture)}")
    if len(picture.reports) > SHOWN:
        lines.append(f"  … and {len(picture.reports) - SHOWN} ranks more")
    for report in guilty:
        if report.end == "exception":
            lines.append(f"{report.label} raised:\n{report.what.rstrip()}")
        elif fault.kind == "slow" and report.stack and not report.silent:
            lines.append(f"{report.label} was at:\n{report.stack.rstrip()}")
    lines.append(f"all last calls: python -m {__package__} report {folder}")
    return fault._replace(text="\n".join(lines))


def _doing(report: Report, picture: Picture) -> str:
    """Return one line on where a rank is."""
    step = "" if report.step is None else f" after step {report.step}"
    if report.end == "finished":
        return f"{report.label} has finished{step}{_last(report)}"
    if report.end:
        return f"{report.label} is gone{step}{_last(report)}"
    if report.silent:
        return f"{report.label} says nothing{_last(report)}"
    parts = []
    for wait in report.waits:
        if wait.channel not in picture.channels:
            continue
        entry = report.tail(wait.channel).get(wait.seq)
        what = "a call" if entry is None else f"{entry.text} at {entry.site}"
        missing = ", ".join(str(m.rank) for m in missing_members(picture, wait)[:8])
        label = picture.channels[wait.channel].label
        lacks = f", which rank(s) {missing} did not make" if missing else ""
        where = "on its device's stream in" if wait.stream else "in"
        parts.append(
            f"{where} {what}, call {wait.seq + 1} in {label} ({wait.seconds:.1f} s){lacks}"
        )
    if parts:
        return f"{report.label} waits{step} {'; and '.join(parts)}"
    return f"{report.label} is in no call{step}{_last(report)}"


def _last(report: Report) -> str:
    """Return the last call of a rank as text."""
    entries = [entry for tail in report.tails.values() for entry in tail.values()]
    if not entries:
        return ""
    last = max(entries, key=lambda entry: entry.time)
    return f"; its last call was {last.text} at {last.site}"

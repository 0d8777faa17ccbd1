"""Putting the ledgers of a folder together: what `report` prints, and what a lone rank can know."""

from __future__ import annotations

import glob
import os

from .facts import Entry, Picture, Report, Wait
from .ledger import read_ledger, tails
from .mismatch import find_mismatch
from .wording import tell

WIDTH = 4096  # entries of a channel that are compared


def picture_of_folder(folder: str) -> Picture:
    """Return what the ledgers of a folder tell; ledgers that cannot be read are left out."""
    picture = Picture({}, {}, 0.0, 0.0)
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "rank*.ledger"))):
        try:
            rank, label, channels, entries = read_ledger(path)
        except (OSError, ValueError):
            continue
        picture.channels |= channels
        picture.reports[rank] = _report(rank, label, entries)
    for channel in picture.channels.values():
        for rank in channel.members:
            picture.reports.setdefault(rank, Report(rank, f"rank {rank} (no ledger here)"))
    return picture


def _report(rank: int, label: str, entries: list[Entry]) -> Report:
    report = Report(rank, label, tails=tails(entries, WIDTH))
    latest = entries[-1].time if entries else 0.0
    for entry in entries:
        report.counts[entry.channel] = entry.seq + 1
    waiting = [entry for entry in entries if entry.state == "waiting"][-4:]
    for number, entry in enumerate(waiting):
        wait = Wait(number, entry.channel, entry.seq, latest - entry.time)
        report.waits.append(wait)
        report.since[number] = 0.0
    return report


def report_folder(folder: str, count: int = 8) -> str:
    """Return the last calls of each rank side by side, the first difference, and who waits.

    Raises:
        FileNotFoundError: there is no ledger in the folder.
    """
    picture = picture_of_folder(folder)
    if not picture.reports:
        raise FileNotFoundError(f"no ledgers (rank*.ledger) in {folder}")
    parts = []
    for key, channel in sorted(picture.channels.items()):
        members = [picture.reports[rank] for rank in channel.members]
        lines = [f"{channel.label} (ranks {', '.join(map(str, channel.members))})"]
        end = max(report.counts.get(key, 0) for report in members)
        for seq in range(max(0, end - count), end):
            lines += _row(seq, key, members)
        parts.append("\n".join(lines))
    fault = find_mismatch(picture, float("inf"))
    if fault is not None:
        parts.append("first difference: " + tell(fault, picture, folder))
    else:
        parts.append("no difference among the calls that are still in the ledgers")
        parts.append("\n".join(_standing(report, picture) for report in picture.reports.values()))
    return "\n\n".join(parts)


def _row(seq: int, key: str, members: list[Report]) -> list[str]:
    """Return one line for a call that all made alike, and one for each rank otherwise."""
    texts = {}
    for report in members:
        entry = (report.tails or {}).get(key, {}).get(seq)
        gone = "(no longer in the ledger)" if report.counts.get(key, 0) > seq else "-"
        texts[report.rank] = gone if entry is None else f"{entry.state:8}{entry.text}  {entry.site}"
    if len(set(texts.values())) == 1:
        return [f"  {seq + 1:6}  all     {next(iter(texts.values()))}"]
    return [f"  {seq + 1:6}  {rank:<8}{text}" for rank, text in texts.items()]


def _standing(report: Report, picture: Picture) -> str:
    waits = [
        f"call {wait.seq + 1} in {picture.channels[wait.channel].label}" for wait in report.waits
    ]
    return f"{report.label} " + (f"waits in {', '.join(waits)}" if waits else "waits in nothing")

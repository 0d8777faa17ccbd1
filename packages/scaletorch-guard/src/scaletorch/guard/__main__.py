"""The command `python -m scaletorch.guard report FOLDER` prints the last calls of a job's ranks."""

from __future__ import annotations

import argparse
import sys

from .diagnosis import with_details
from .facts import Picture, Report
from .ledger import read_folder
from .mismatch import find_mismatch


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}")
    commands = parser.add_subparsers(required=True)
    report = commands.add_parser("report", help="merge the ledgers in a folder")
    report.add_argument("folder")
    report.add_argument("--last", type=int, default=8, help="calls of each group to show")
    options = parser.parse_args(arguments)
    picture = read_folder(options.folder)
    if not picture.reports:
        sys.stderr.write(f"no ledgers (rank*.ledger) in {options.folder}\n")
        return 1
    sys.stdout.write(_show(picture, options.folder, options.last) + "\n")
    return 0


def _show(picture: Picture, folder: str, last: int) -> str:
    """Return the last calls in each channel, the first difference, and else each rank's waits."""
    paragraphs = []
    for key, channel in sorted(picture.channels.items()):
        members = picture.members(key)
        lines = [f"{channel.label} (ranks {', '.join(map(str, channel.members))})"]
        end = max(report.counts.get(key, 0) for report in members)
        for seq in range(max(0, end - last), end):
            lines += _row(seq, key, members)
        paragraphs.append("\n".join(lines))
    fault = find_mismatch(picture, float("inf"))
    if fault is not None:
        paragraphs.append("first difference: " + with_details(fault, picture, folder).text)
    else:
        paragraphs.append("no difference among the calls that are still in the ledgers")
        standing = [_standing(report, picture) for report in picture.reports.values()]
        paragraphs.append("\n".join(standing))
    return "\n\n".join(paragraphs)


def _row(seq: int, key: str, members: list[Report]) -> list[str]:
    """Return one line for a call that is the same on all ranks, else one line per rank."""
    texts = {}
    for report in members:
        entry = report.tail(key).get(seq)
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


if __name__ == "__main__":
    raise SystemExit(main())

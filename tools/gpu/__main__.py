"""Checks on a GPU: tests, proofs, faults and figures; each group has its own process.

hatch run gpu                       everything, in 8 minutes at most, on the first CUDA device
hatch run gpu --only matrix         the groups whose names begin so
hatch run gpu --device cpu --quick  a dry run of the tool itself: figures of a CPU mean nothing
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .checks import FAILED, HUNG, SKIPPED, SLACK
from .groups import GROUPS, Group
from .run import Outcome, Running

SECONDS = 470.0  # for all groups together; start and end take the rest of the 8 minutes
HEADER = ("group", "", "s", "checks", "worst error", "")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        "hatch run gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of groups' names")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="JSON; %(default)s")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="few and tiny checks")
    parser.add_argument("--list", action="store_true", help="print the groups' names")
    return parser.parse_args(arguments)


def machine(device: str) -> dict[str, Any]:
    """Return the machine and versions that the figures belong to."""
    found: dict[str, Any] = {"device": "CPU", "python": sys.version.split()[0]}
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    if device == "cuda":
        count, memory = torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory
        found |= {"device": torch.cuda.get_device_name(0), "devices": count, "bytes": memory}
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def outcomes(groups: Sequence[Group], folder: Path, given: dict[str, Any]) -> Iterator[Outcome]:
    """Run groups one after another; meanwhile the next group loads its libraries."""
    slack, following = SLACK[given["device"]], None
    end = time.monotonic() + SECONDS * slack
    try:
        for group, after in zip(groups, [*groups[1:], None], strict=True):
            left = end - time.monotonic()
            if left < 10:
                yield Outcome(group.name, SKIPPED, 0.0, [], "the time of all groups is over")
                continue
            running = following or Running(group, folder, given)
            following = Running(after, folder, given) if after is not None else None
            try:
                yield running.finish(min(group.limit * slack, left))
            finally:
                running.end()
    finally:
        if following is not None:
            following.end()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a group failed or hung, 2 without a CUDA device."""
    given = parse(arguments)
    groups = [each for each in GROUPS if each.name.startswith(tuple(given.only))]
    if given.list or not groups:
        print("\n".join(each.name for each in GROUPS))
        return 0 if given.list else 2
    if given.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device that torch can use: --device cpu is a dry run", file=sys.stderr)
        return 2
    found, here = [], machine(given.device)
    print(*(f"{name} {value}" for name, value in here.items()), sep=", ")
    print(row(HEADER), flush=True)
    with tempfile.TemporaryDirectory(prefix="scaletorch-gpu-") as folder:
        told = {"device": given.device, "quick": given.quick}
        for outcome in outcomes(groups, Path(folder), told):
            found.append(outcome)
            print(row(outcome.cells()), flush=True)
            plain = {**here, "groups": [each.plain() for each in found]}
            given.out.write_text(json.dumps(plain, indent=1))  # keep what is done
    for outcome in found:
        for each in outcome.rows:
            if each.figures:
                print(f"{outcome.name}, {each.name}:", each.figures)
    return int(any(outcome.word in (FAILED, HUNG) for outcome in found))


def row(cells: Sequence[str]) -> str:
    """Return a line of the table."""
    widths = (26, 7, 4, 7, 11, 0)
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


if __name__ == "__main__":
    raise SystemExit(main())

"""Every call of scaletorch.dist against raw torch.distributed and MMEngine's dist, on two ranks.

Two ranks over gloo. In every round each way takes its turn, shuffled, in the same processes; the
slower rank counts. The tables show medians over the rounds: of torch's time, of each round's
difference and ratio of ours to torch's, and of its ratio of MMEngine's to ours.

    python -m benchmarks.dist --json dist.json
    python -m benchmarks.dist --parts "8 B" "1 KiB" --only all_reduce
    python -m benchmarks.process_groups       # set-up of groups at 1,024 and 16,384 ranks

The aims: at most 5 µs over torch in small calls, at most 1.02 times torch's time from 1 MiB on, and
never slower than MMEngine (beyond 2 %, or 5 µs). `no network` is torch's "fake" backend: the time
of Python without messages, which take 20 times as long and vary.

MMEngine is skipped if `import mmengine.dist` fails. To install it: `pip install --no-deps mmengine`
and `pip install addict yapf termcolor`.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from scaletorch.dist import launch

from ..harness.tables import parser, ratios, table
from .measure import SIZES, Rows, Times, measure, python_path
from .ways import LOOP, MMENGINE, OURS, TORCH, mmengine

PARTS = [*SIZES, "models", "objects"]
SMALL = ("no network", "8 B", "1 KiB")
OVER, RATIO = 5e-6, 1.02
COLUMNS = ["torch µs", "over µs", "ratio", "to a loop", "MM/ours", "aims missed"]


def cells(part: str, times: Times) -> tuple[list[str], list[str]]:
    """Return the figures of one call, and the aims that they miss."""
    found, missed = [""] * 5, []
    ours = times[OURS]
    if TORCH in times:
        over, against = difference(ours, times[TORCH]), median(ratios(ours, times[TORCH]))
        found[:3] = f"{median(times[TORCH]) * 1e6:.1f}", f"{over * 1e6:+.1f}", f"{against:.3f}"
        if part in SMALL and over > OVER:
            missed.append("over")
        if part in ("1 MiB", "64 MiB") and against > RATIO:
            missed.append("ratio")
    if LOOP in times:
        found[3] = f"{median(ratios(ours, times[LOOP])):.3f}"
    if MMENGINE in times:
        against = median(ratios(times[MMENGINE], ours))
        found[4] = f"{against:.2f}"
        if against < 1 / RATIO and difference(ours, times[MMENGINE]) > OVER:
            missed.append("MMEngine")
    return found, missed


def difference(ours: list[float], theirs: list[float]) -> float:
    """Return the median of each round's difference."""
    return median(one - other for one, other in zip(ours, theirs, strict=True))


def show(rows: Rows) -> None:
    """Print a table for each part."""
    missing = 0
    for part in dict.fromkeys(part for part, _ in rows):
        lines = []
        for (found_in, name), times in rows.items():
            if found_in == part:
                figures, missed = cells(part, times)
                lines.append([name, *figures, ", ".join(missed)])
                missing += len(missed)
        print(f"\n{table([part, *COLUMNS], lines)}")
    print(f"\n{len(rows)} lines, {missing} aims missed")


def main() -> None:
    """Measure and print."""
    command = parser(__doc__)
    command.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    command.add_argument("--rounds", type=int, default=31, metavar="N")
    command.add_argument("--only", default="", metavar="TEXT", help="calls with this in their name")
    command.add_argument("--json", type=Path, metavar="FILE", help="write every round's times")
    args = command.parse_args()
    if mmengine() is None:
        print("MMEngine is not installed: skipped")
    rows = python_path(args.rounds) if "8 B" in args.parts and not args.only else {}
    rows |= launch(measure, 2, args.parts, args.rounds, args.only)[0]
    show(rows)
    if args.json:
        found = [{"part": part, "call": name, **times} for (part, name), times in rows.items()]
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

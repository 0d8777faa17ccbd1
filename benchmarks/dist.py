"""Every call of scaletorch.dist against raw torch.distributed and MMEngine's dist, on two ranks.

Two ranks over gloo. In every round each way takes its turn, shuffled, in the same processes; of the
ranks the slower counts. What is shown are medians over the rounds: of the time of torch, and of
each round's own difference and ratio of ours to torch's, and of MMEngine's to ours.

    python benchmarks/dist.py --json dist.json
    python benchmarks/dist.py --parts "8 B" "1 KiB" --only all_reduce
    python benchmarks/process_groups.py           # set-up of groups at 1,024 and 16,384 ranks

The aims: at most 5 µs over torch in small calls, at most 1.02 times torch's time from 1 MiB on, and
never slower than MMEngine (beyond 2 %, or 5 µs). `no network` is torch's "fake" backend: the time
that Python takes, without that of messages, which is 20 times as much and varies.

MMEngine is skipped where `import mmengine.dist` fails: `pip install --no-deps mmengine` and
`pip install addict yapf termcolor` are enough for it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from dist_measure import SIZES, Rows, Times, measure, python_path
from dist_ways import MMENGINE, OURS, TORCH, mmengine

from scaletorch.dist import launch

PARTS = [*SIZES, "models", "objects"]
SMALL = ("no network", "8 B", "1 KiB")
OVER, RATIO = 5e-6, 1.02


def median_of(left: list[float], right: list[float], kind: str) -> float:
    """Return the median of each round's own difference or ratio."""
    pairs = zip(left, right, strict=True)
    return statistics.median(a - b if kind == "-" else a / b for a, b in pairs)


def line(part: str, times: Times) -> tuple[str, list[str]]:
    """Return one call's figures, and the aims that they miss."""
    text, missed = "", []
    if TORCH in times:
        over = median_of(times[OURS], times[TORCH], "-")
        ratio = median_of(times[OURS], times[TORCH], "/")
        text = f"{statistics.median(times[TORCH]) * 1e6:12.1f}{over * 1e6:+11.1f}{ratio:8.3f}"
        if part in SMALL and over > OVER:
            missed.append("over")
        if part in ("1 MiB", "64 MiB") and ratio > RATIO:
            missed.append("ratio")
    else:
        text = f"{'-':>12}{'-':>11}{'-':>8}"
    if MMENGINE in times:
        slower = median_of(times[OURS], times[MMENGINE], "-")
        ratio = median_of(times[MMENGINE], times[OURS], "/")
        text += f"{ratio:11.2f}"
        if ratio < 1 / RATIO and slower > OVER:
            missed.append("MMEngine")
    else:
        text += f"{'-':>11}"
    return text, missed


def show(rows: Rows) -> None:
    """Print a table of each part."""
    ways = f"{'torch µs':>12}{'over µs':>11}{'ratio':>8}{'MM/ours':>11}"
    count, missing = 0, []
    for part in dict.fromkeys(part for part, _ in rows):
        print(f"\n{part:36}{ways}   aims missed")
        for (where, name), times in rows.items():
            if where == part:
                text, missed = line(part, times)
                count += 1
                missing += [f"{part}: {name} ({aim})" for aim in missed]
                print(f"  {name:34}{text}   {', '.join(missed)}")
                if "torch, a loop" in times:
                    ratio = median_of(times[OURS], times["torch, a loop"], "/")
                    print(f"  {'':34}{'against a loop':>24}{ratio:7.3f}")
    print(f"\n{count} lines, {len(missing)} aims missed")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=31, metavar="N")
    parser.add_argument("--only", default="", metavar="TEXT", help="calls with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's times")
    args = parser.parse_args()
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

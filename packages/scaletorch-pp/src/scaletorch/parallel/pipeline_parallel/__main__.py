"""Draw a schedule from the command line; no process group is needed."""

from __future__ import annotations

import argparse
import inspect
import shutil
import sys
from collections.abc import Callable, Sequence

from ...dist.errors import InvalidArgumentError
from .drawing import to_text
from .schedules import SCHEDULES, Costs, Schedule, check, simulate

EPILOG = """\
F0 is the forward of micro-batch 0, B0 its backward, I0 and W0 the two parts of a backward: the
gradient of the inputs and those of the weights. Dots are idle time. Costs are those of one stage,
so with two stages on a rank, half of what the rank's layers take.
Exit status: 0 printed, 2 the arguments or the schedule are wrong."""


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the schedule that the arguments describe, and return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        schedule = _schedule(args)
        report = check(schedule)
        timeline = simulate(schedule, _costs(args))
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        text = to_text(timeline, width, peak=report.peak_live)
    except InvalidArgumentError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


def _schedule(args: argparse.Namespace) -> Schedule:
    build: Callable[..., Schedule] = SCHEDULES[args.schedule]
    if args.chunks is None:
        return build(args.stages, args.micro_batches)
    if not _takes_chunks(args.schedule):
        able = ", ".join(filter(_takes_chunks, SCHEDULES))
        raise InvalidArgumentError(
            f"the stages of a rank are given with {args.schedule}; --chunks is for {able}"
        )
    return build(args.stages, args.micro_batches, num_chunks=args.chunks)


def _takes_chunks(name: str) -> bool:
    return "num_chunks" in inspect.signature(SCHEDULES[name]).parameters


def _costs(args: argparse.Namespace) -> Costs:
    half = args.backward / 2
    return Costs(args.forward, args.backward, half, half, args.message)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description="Check a schedule, draw it, and tell makespan, bubble and peak activations.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--schedule", choices=list(SCHEDULES), required=True, help="its name")
    for name, required, what in (
        ("stages", True, "ranks of the pipeline, each with one stage, or several chunks' stages"),
        ("micro-batches", True, "micro-batches of a step"),
        ("chunks", False, "stages of each rank, for schedules that leave it open (default: 2)"),
    ):
        parser.add_argument(f"--{name}", type=int, required=required, metavar="N", help=what)
    for name, cost, what in (
        ("forward", 1.0, "a stage's forward"),
        ("backward", 2.0, "a stage's backward; its two parts take half each"),
        ("message", 0.0, "a message to another rank"),
    ):
        parser.add_argument(
            f"--{name}", type=float, default=cost, metavar="T",
            help=f"time of {what} (default: {cost:g})",
        )  # fmt: skip
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m scaletorch.bisect run --layout 1x1x1x2` compares a layout with one process.

`python -m scaletorch.bisect compare ONE OTHER` compares two recorded runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..compose.naming import parse_layout
from ..dist.errors import ScaletorchError
from ..verify.__main__ import add_training, problem_of, training_of
from ..verify.cases import KNOWN_DTYPES, OPTIONS
from ..verify.problem import STEPS
from .compare import Report, compare
from .locate import bisect


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(f"python -m {__package__}", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    two = commands.add_parser("compare", help="compare two folders that `record` wrote")
    two.add_argument("reference", type=Path, help="the correct run, best one process in float64")
    two.add_argument("run", type=Path, help="the run to check")
    two.add_argument("--noise", type=Path, help="the reference in the run's lower dtype")
    one = commands.add_parser("run", help="train a model on a layout and in one process")
    one.add_argument("--layout", required=True, help="DPxPPxCPxTP, as 2x1x2x2 or 2x1x2x2-ep4")
    add_training(one)
    one.add_argument("--dtype", default="float64", choices=KNOWN_DTYPES)
    one.add_argument("--steps", type=int, default=STEPS, choices=range(1, STEPS + 1))
    one.add_argument("--keep", type=Path, help="folder for the recordings")
    for name, values in OPTIONS.items():
        shown = f"of {', '.join(map(str, values))}; {values[0]} by default"
        flag, kind = f"--{name.replace('_', '-')}", type(values[0])
        one.add_argument(flag, type=kind, default=values[0], help=shown)
    return parser.parse_args(words)


def run(arguments: argparse.Namespace) -> Report:
    """Run the command's comparison and return its report."""
    if arguments.command == "compare":
        return compare(arguments.reference, arguments.run, noise=arguments.noise)
    grid = parse_layout(arguments.layout)
    model, batch = problem_of(arguments, [grid])
    return bisect(
        model,
        batch,
        layout=grid,
        dtype=arguments.dtype,
        options={name: getattr(arguments, name) for name in OPTIONS},
        steps=arguments.steps,
        folder=arguments.keep,
        **training_of(arguments),
    )


def main(given: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    0: the runs agree. 1: they differ. 2: they cannot be compared. 3: not judged, since some results
    of the training could not be compared and the others agree.
    """
    arguments = parse(sys.argv[1:] if given is None else given)
    try:
        report = run(arguments)
    except ScaletorchError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(report)
    return 1 if report.found else 3 * bool(report.unjudged)


if __name__ == "__main__":
    sys.exit(main())

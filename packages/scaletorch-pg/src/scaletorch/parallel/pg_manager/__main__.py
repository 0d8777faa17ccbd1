"""Print a grid from the command line; no process group is needed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ...dist.errors import InvalidArgumentError
from .grid import Grid
from .show import grid_text, rank_text

MAX_RANKS = 10_000_000

EPILOG = """\
The order of ranks is [DP, PP, CP, TP], TP fastest: tp groups are neighbouring ranks.
Exit status: 0 printed, 2 the arguments are wrong."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the grid that the arguments describe; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        print(_text(args))
    except InvalidArgumentError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _text(args: argparse.Namespace) -> str:
    grid = Grid(tp=args.tp, cp=args.cp, pp=args.pp, dp=args.dp)
    gpus = args.gpus_per_node
    if gpus is not None and gpus < 1:
        raise InvalidArgumentError(f"--gpus-per-node must be a positive int, got {gpus}")
    if grid.world_size > MAX_RANKS:
        message = f"{grid} has {grid.world_size} ranks, more than the {MAX_RANKS} that are listed"
        raise InvalidArgumentError(message)
    parts = [grid_text(grid, gpus)]
    if args.rank is not None:
        parts.append(rank_text(grid, args.rank, gpus))
    return "\n\n".join(parts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description="Show the groups of a 4D layout, and which of them cross nodes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for axis, name in (
        ("tp", "tensor parallel"),
        ("cp", "context parallel"),
        ("pp", "pipeline parallel"),
        ("dp", "data parallel"),
    ):
        parser.add_argument(
            f"--{axis}", type=int, default=1, metavar="N", help=f"{name} size (default: 1)"
        )
    parser.add_argument("--rank", type=int, metavar="R", help="show this global rank's place too")
    parser.add_argument(
        "--gpus-per-node", type=int, metavar="G", help="ranks on a node: show which axes cross"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

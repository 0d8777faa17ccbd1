"""Print a grid from the command line: its groups in short form, and one rank's place in them.

No process group is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ...dist.errors import InvalidArgumentError
from .communicators import AXES
from .grid import EXPERT_AXES, ORDER, Grid
from .layouts import place_text, short_ranks

MAX_RANKS = 10_000_000

EPILOG = """\
The order of ranks is [DP, PP, CP, TP], TP fastest: tp groups are neighbouring ranks.
Experts have axes of their own over the ranks of a stage in that order: [EDP, EP, ETP].
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
    grid = Grid(args.tp, args.cp, args.pp, args.dp, args.ep, args.etp)
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
        ("ep", "expert parallel"),
    ):
        parser.add_argument(
            f"--{axis}", type=int, default=1, metavar="N", help=f"{name} size (default: 1)"
        )
    parser.add_argument(
        "--etp", type=int, metavar="N", help="expert tensor parallel size: 1 (default) or tp"
    )
    parser.add_argument("--rank", type=int, metavar="R", help="show this global rank's place too")
    parser.add_argument(
        "--gpus-per-node", type=int, metavar="G", help="ranks on a node: show which axes cross"
    )
    return parser


def grid_text(grid: Grid, gpus_per_node: int | None = None) -> str:
    """Return a table of axes: size, number of groups, nodes that one spans, the first two groups.

    Experts' axes are among them where experts have a view of their own.

    Args:
        grid: The layout.
        gpus_per_node: Ranks on each node; None leaves the nodes out.
    """
    axes = _axes(grid)
    spans = {axis: nodes_spanned(grid, axis, gpus_per_node) for axis in axes if gpus_per_node}
    rows = [["axis", "size", "groups", *(["nodes"] if spans else []), "  first groups"]]
    for axis in axes:
        count = grid.world_size // grid.size(axis)
        nodes = [str(spans[axis])] if spans else []
        rows.append(
            [axis, str(grid.size(axis)), str(count), *nodes, f"  {_first_groups(grid, axis)}"]
        )
    parts = [_title(grid, gpus_per_node), _table(rows)]
    if spans:
        parts.append(_crossings(spans))
    return "\n\n".join(parts)


def rank_text(grid: Grid, rank: int, gpus_per_node: int | None = None) -> str:
    """Return one rank's coordinates, groups and neighbours.

    Raises:
        InvalidArgumentError: `rank` outside the grid.
    """
    place = f"rank {rank} of {grid.world_size}: {place_text(grid, rank)}"
    if gpus_per_node:
        place += f", node {rank // gpus_per_node}, local rank {rank % gpus_per_node}"
    rows = [["axis", "place", "  group"]]
    for axis in _axes(grid):
        position = f"{grid.group_rank(axis, rank)} of {grid.size(axis)}"
        rows.append([axis, position, f"  {_bracket(grid.group(axis, rank))}"])
    ring = grid.ring_neighbours("cp", rank)
    stage = grid.pipeline_neighbours(rank)
    neighbours = (
        f"cp ring: sends to rank {ring.send}, receives from rank {ring.recv}\n"
        f"pipeline: previous stage {_stage(stage.prev)}, next stage {_stage(stage.next)}"
    )
    return "\n\n".join([place, _table(rows), neighbours])


def nodes_spanned(grid: Grid, axis: str, gpus_per_node: int) -> int:
    """Return the number of nodes that the widest-spread group of `axis` has ranks on."""
    return max(len({rank // gpus_per_node for rank in group}) for group in grid.groups(axis))


def _axes(grid: Grid) -> list[str]:
    return [axis for axis in AXES if axis not in EXPERT_AXES or not grid.is_plain]


def _title(grid: Grid, gpus_per_node: int | None) -> str:
    title = f"Grid {_shape(grid, ORDER)}"
    title += "" if grid.is_plain else f", experts {_shape(grid, EXPERT_AXES)}"
    title += f": {_count(grid.world_size, 'rank')}"
    if gpus_per_node:
        nodes, rest = divmod(grid.world_size, gpus_per_node)
        title += f" on {_count(nodes + bool(rest), 'node')} of {gpus_per_node}"
        title += f" (the last has {rest})" if rest else ""
    return title


def _shape(grid: Grid, axes: Sequence[str]) -> str:
    return f"[{', '.join(f'{axis.upper()} {getattr(grid, axis)}' for axis in axes)}]"


def _crossings(spans: dict[str, int]) -> str:
    inside = ", ".join(axis for axis, nodes in spans.items() if nodes == 1) or "none"
    across = ", ".join(axis for axis, nodes in spans.items() if nodes > 1) or "none"
    return f"within a node: {inside}\ncross nodes: {across}"


def _first_groups(grid: Grid, axis: str) -> str:
    groups = grid.groups(axis)
    shown = " ".join(_bracket(group) for group in groups[:2])
    return f"{shown} ..." if len(groups) > 2 else shown


def _bracket(ranks: Sequence[int]) -> str:
    return f"[{short_ranks(ranks)}]"


def _stage(rank: int | None) -> str:
    return "none" if rank is None else f"on rank {rank}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _table(rows: list[list[str]]) -> str:
    """Return lines with the first and last columns flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *middle, last in rows:
        cells = [cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells, last]).rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())

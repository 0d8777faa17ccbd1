"""Group set-up on one rank of a large world: a manager's own groups against torch's device mesh.

The world is torch's "fake" backend, so one process can be any rank of it: only the work in the
process is measured, without the network. A mesh has four groups a rank, the manager seven; the
third row adds the joined axes to the mesh.

    python -m benchmarks.process_groups --ranks 1024 16384 --repeats 15
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as torch_dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from scaletorch.parallel.pg_manager import Grid, ProcessGroupManager

from .harness.tables import parser, ratio, table
from .harness.turns import in_turns

AXES = ("dp", "pp", "cp", "tp")
COLUMNS = ["way", "ms", "least", "most", "ratio (quartiles)", "new_group calls"]


def manager(grid: Grid) -> None:
    """Create the manager's seven groups."""
    ProcessGroupManager(grid.tp, grid.cp, grid.pp, grid.dp)


def mesh(grid: Grid) -> Any:
    """Create the four groups of a mesh."""
    shape = tuple(getattr(grid, axis) for axis in AXES)
    return init_device_mesh("cpu", shape, mesh_dim_names=AXES)


def mesh_and_joined_axes(grid: Grid) -> None:
    """Create the four groups of a mesh, and those of dp with cp and of dp with pp."""
    whole = mesh(grid)
    whole["dp", "cp"]._flatten()
    whole["dp", "pp"]._flatten()


WAYS: dict[str, Callable[[Grid], Any]] = {
    "ProcessGroupManager": manager,
    "init_device_mesh": mesh,
    "init_device_mesh, joined axes too": mesh_and_joined_axes,
}


def layout(ranks: int) -> Grid:
    """Return the documented 8 x 4 x 16, with enough data parallelism to fill the world."""
    if ranks % 512:
        raise SystemExit(f"--ranks must be multiples of 8 * 4 * 16 = 512, got {ranks}")
    return Grid(tp=8, cp=4, pp=16, dp=ranks // 512)


def measure(way: Callable[[Grid], Any], grid: Grid, rank: int) -> tuple[float, int]:
    """Return milliseconds and new_group calls of a set-up in a new world, as torchrun leaves it."""
    place = {"RANK": rank, "WORLD_SIZE": grid.world_size, "LOCAL_RANK": rank % 8}
    os.environ.update(
        {name: str(value) for name, value in place.items()} | {"LOCAL_WORLD_SIZE": "8"}
    )
    torch_dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=grid.world_size)
    real, calls = c10d._new_group_with_tag, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(*args, **kwargs)

    c10d._new_group_with_tag = counted  # every new group is created by this function
    try:
        begin = time.perf_counter()
        way(grid)
        elapsed = time.perf_counter() - begin
    finally:
        c10d._new_group_with_tag = real
        torch_dist.destroy_process_group()
    return elapsed * 1e3, calls


def compare(grid: Grid, repeats: int) -> None:
    """Measure every way in turns, `repeats` times, and print the medians."""
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    calls: dict[str, int] = {}
    for way in WAYS.values():
        measure(way, layout(512), 0)  # the first use imports and compiles
    for name in in_turns(WAYS, repeats):
        rank = grid.world_size * len(times[name]) // repeats
        elapsed, calls[name] = measure(WAYS[name], grid, rank)
        times[name].append(elapsed)
    ours = times["ProcessGroupManager"]
    rows = [
        [
            name, f"{statistics.median(values):.2f}", f"{min(values):.2f}", f"{max(values):.2f}",
            ratio(values, ours, 1), calls[name],
        ]
        for name, values in times.items()
    ]  # fmt: skip
    print(f"\n{grid.world_size} ranks, {grid}, {repeats} repeats\n\n{table(COLUMNS, rows)}")


def main() -> None:
    """Compare at each size."""
    command = parser(__doc__)
    command.add_argument("--ranks", type=int, nargs="+", default=[1024, 16384], metavar="N")
    command.add_argument("--repeats", type=int, default=15, metavar="N")
    args = command.parse_args()
    warnings.filterwarnings("ignore", message=".*flatten.*")
    for ranks in args.ranks:
        compare(layout(ranks), args.repeats)


if __name__ == "__main__":
    main()

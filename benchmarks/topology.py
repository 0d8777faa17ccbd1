"""Collectives of a group that spans nodes: torch's, which ignore nodes, and our hierarchical ones.

    python -m benchmarks.topology            # as root, about 2 min: see harness/links.py
    python -m benchmarks.topology --quick

Two nodes of two ranks each; messages between nodes are slow, those inside a node use loopback. Each
cell is the median over repeats of the slowest rank's time; the ways take turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as c10d
from torch import Tensor

import scaletorch.dist as dist
from scaletorch.dist.wire.backend import all_gather_single, reduce_scatter_single

from .harness.ranks import run_on_nodes
from .harness.tables import parser, ratio, table
from .harness.turns import Run, of_slowest_rank, repeated, seconds

TORCH, OURS = "torch", "ours"
Ways = dict[str, dict[str, Run]]  # by call
Found = dict[tuple[str, str], dict[str, list[float]]]

NODES, PLACES = 2, 2
LINKS = {"10 ms": (0.01, None), "1 ms": (0.001, None), "100 Mbit/s": (0.0001, 12.5e6)}
SIZES = {"8 B": 8, "64 KiB": 2**16, "1 MiB": 2**20, "8 MiB": 2**23}


def calls(size: int, flat: c10d.ProcessGroup, deep: c10d.ProcessGroup) -> Ways:
    """Return torch's and our way of each call, on `size` bytes in all."""
    ranks = c10d.get_world_size()
    data = torch.ones(max(size // 4, 1))
    part = torch.ones(max(len(data) // ranks, 1))
    parts: list[Tensor] = [part.clone() for _ in range(ranks)]
    rows = torch.empty(ranks * len(part))
    return {
        "all_reduce": {
            TORCH: lambda: c10d.all_reduce(data, group=flat),
            OURS: lambda: dist.all_reduce(data, group=deep),
        },
        "all_gather": {
            TORCH: lambda: all_gather_single(rows, part, group=flat),
            OURS: lambda: dist.all_gather(part, group=deep),
        },
        "reduce_scatter": {
            TORCH: lambda: reduce_scatter_single(part, rows, group=flat),
            OURS: lambda: dist.reduce_scatter(part, parts, group=deep),
        },
    }


def measure(repeats: int) -> Found:
    """Return each way's seconds in every repeat on the slowest rank, by call and size."""
    flat, deep = c10d.new_group(), c10d.new_group()
    if not dist.use_hierarchy(deep):
        raise SystemExit("the nodes were not found")
    found: Found = {}
    for size_name, size in SIZES.items():
        for call, ways in calls(size, flat, deep).items():
            repeated(seconds, ways, 1)  # warm-up
            times = repeated(seconds, ways, repeats)
            found[call, size_name] = {name: of_slowest_rank(each) for name, each in times.items()}
    return found


def cells(found: Found) -> Iterator[Sequence[str]]:
    """Yield the row of each call and size."""
    for (call, size), times in found.items():
        medians = (f"{1e3 * statistics.median(times[way]):.1f}" for way in (TORCH, OURS))
        yield [call, size, *medians, ratio(times[OURS], times[TORCH], 2)]


def main() -> None:
    """Print a table for each kind of link."""
    command = parser(__doc__)
    command.add_argument("--quick", action="store_true", help="fewer repeats")
    repeats = 2 if command.parse_args().quick else 7
    for name, (latency, bandwidth) in LINKS.items():
        print(f"\n### {NODES} nodes x {PLACES} ranks, {name} between nodes\n")
        found = run_on_nodes(measure, NODES, PLACES, latency, bandwidth, repeats)[0]
        print(table(["call", "bytes", "torch, ms", "ours in levels, ms", "ratio"], cells(found)))


if __name__ == "__main__":
    main()

"""Collectives of a group that spans nodes: torch's, which know of no nodes, and ours in levels.

    python benchmarks/topology.py            # as root, about 2 min: see slow_links.py
    python benchmarks/topology.py --quick

Two nodes of two ranks each; what goes from node to node takes its time, what stays is loopback.
Each cell is the median over repeats of the slowest rank's time, ways in turn.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as c10d
from slow_links import DEVICE, join, slow_links
from torch import Tensor

import scaletorch.dist as dist
from scaletorch.dist import RankPool
from scaletorch.dist.collectives.raw import all_gather_single, reduce_scatter_single

Ways = dict[str, list[Callable[[], object]]]  # of each call, torch's and ours

NODES, PLACES = 2, 2
LINKS = {"10 ms": (0.01, None), "1 ms": (0.001, None), "100 Mbit/s": (0.0001, 12.5e6)}
SIZES = {"8 B": 8, "64 KiB": 2**16, "1 MiB": 2**20, "8 MiB": 2**23}


def enter(address: str, folder: str) -> None:
    """Put this rank on its node: the first of a node joins the links, the others follow it."""
    node, place = divmod(int(os.environ["RANK"]), PLACES)
    leader = Path(folder, f"node-{node}")
    if place == 0:
        join(address, node)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        leader.with_suffix(".new").write_text(str(os.getpid()))
        leader.with_suffix(".new").rename(leader)
        return
    while not leader.exists():
        time.sleep(0.01)
    with open(f"/proc/{leader.read_text()}/ns/net") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), 0):
            raise OSError(ctypes.get_errno(), "a network namespace needs root")


def calls(size: int, flat: c10d.ProcessGroup, deep: c10d.ProcessGroup) -> Ways:
    """Return for each call torch's and ours, on ``size`` bytes in all."""
    ranks = c10d.get_world_size()
    data = torch.ones(max(size // 4, 1))
    part = torch.ones(max(len(data) // ranks, 1))
    parts: list[Tensor] = [part.clone() for _ in range(ranks)]
    rows = torch.empty(ranks * len(part))
    return {
        "all_reduce": [
            lambda: c10d.all_reduce(data, group=flat), lambda: dist.all_reduce(data, group=deep)
        ],
        "all_gather": [
            lambda: all_gather_single(rows, part, group=flat),
            lambda: dist.all_gather(part, group=deep),
        ],
        "reduce_scatter": [
            lambda: reduce_scatter_single(part, rows, group=flat),
            lambda: dist.reduce_scatter(part, parts, group=deep),
        ],
    }  # fmt: skip


def measure(address: str, folder: str, repeats: int) -> dict[tuple[str, str], list[float]]:
    """Return the medians of torch's and our times, in ms."""
    enter(address, folder)
    rank, ranks = int(os.environ["RANK"]), NODES * PLACES
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    os.environ["GROUP_RANK"] = str(rank // PLACES)  # as a torchrun on each node sets it
    store = c10d.FileStore(os.path.join(folder, "store"), ranks)  # type: ignore[attr-defined]
    c10d.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    flat, deep = c10d.new_group(), c10d.new_group()
    if not dist.use_hierarchy(deep):
        raise SystemExit("the nodes were not found")
    found = {}
    for size_name, size in SIZES.items():
        for call, ways in calls(size, flat, deep).items():
            times: list[list[float]] = [[], []]
            for repeat in range(repeats + 1):
                for way, run in enumerate(ways):
                    c10d.barrier()
                    start = time.perf_counter()
                    run()
                    spent = torch.tensor(time.perf_counter() - start)
                    c10d.all_reduce(spent, c10d.ReduceOp.MAX)
                    if repeat:
                        times[way].append(1e3 * spent.item())
            found[call, size_name] = [statistics.median(each) for each in times]
    return found


def main() -> None:
    """Print a table for each kind of link."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    repeats = 2 if parser.parse_args().quick else 7
    for name, (latency, bandwidth) in LINKS.items():
        print(f"\n### {NODES} nodes x {PLACES} ranks, {name} between nodes\n")
        print("| call | bytes | torch, ms | ours in levels, ms | ratio |")
        print("| --- | --- | --- | --- | --- |")
        with (
            tempfile.TemporaryDirectory() as folder,
            slow_links(NODES, latency, bandwidth) as address,
            RankPool(NODES * PLACES, init=False) as pool,
        ):
            rows = pool.run(measure, address, folder, repeats)[0]
        for (call, size), (torchs, ours) in rows.items():
            print(f"| {call} | {size} | {torchs:.1f} | {ours:.1f} | {ours / torchs:.2f} |")


if __name__ == "__main__":
    main()

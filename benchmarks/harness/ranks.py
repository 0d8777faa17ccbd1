"""Ranks with slow links to each other, or to those of another node."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scaletorch.dist import RankPool

from .links import DEVICE, join, slow_links


def run_on_links(
    measure: Callable[..., Any],
    num_ranks: int,
    seconds: float,
    bandwidth: float | None,
    *args: object,
) -> list[Any]:
    """Return the result of `measure` on every rank; each rank has its own slow link.

    Args:
        measure: A function of a module.
        num_ranks: Number of ranks.
        seconds: Latency of a packet, as for `slow_links`.
        bandwidth: Bytes a second, as for `slow_links`.
        args: Arguments of `measure`.
    """
    return run_on_nodes(measure, num_ranks, 1, seconds, bandwidth, *args)


def run_on_nodes(
    measure: Callable[..., Any],
    num_nodes: int,
    places: int,
    seconds: float,
    bandwidth: float | None,
    *args: object,
) -> list[Any]:
    """Return the result of `measure` on every rank of nodes that slow links connect.

    Args:
        measure: A function of a module.
        num_nodes: Number of nodes; their ranks are consecutive.
        places: Ranks of a node, which reach each other by loopback.
        seconds: Latency of a packet, as for `slow_links`.
        bandwidth: Bytes a second that a node can receive, as for `slow_links`.
        args: Arguments of `measure`.
    """
    with (
        slow_links(num_nodes, seconds, bandwidth) as address,
        tempfile.TemporaryDirectory() as folder,
        RankPool(
            num_nodes * places, timeout=None, init=False, env={"GLOO_SOCKET_IFNAME": DEVICE}
        ) as pool,
    ):
        return pool.run(_enter_and_run, places, address, folder, measure, args)


def _enter_and_run(
    places: int, address: str, folder: str, measure: Callable[..., Any], args: tuple[object, ...]
) -> Any:
    node, place = divmod(int(os.environ["RANK"]), places)
    _enter(node, place, address, Path(folder, f"node-{node}"))
    if places > 1:
        os.environ["GROUP_RANK"] = str(node)  # as torchrun on each node sets it
    _start(folder)
    return measure(*args)


def _enter(node: int, place: int, address: str, leader: Path) -> None:
    """Put this rank on its node: the first rank joins the links, the others its namespace."""
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


def _start(folder: str) -> None:
    """Initialize torch.distributed on this rank, over gloo and a shared file."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.path.join(folder, "store"), num_ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)

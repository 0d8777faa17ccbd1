"""Ranks whose way to each other is slow links."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
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
    """Return what `measure` returns on every rank, of which each is alone on its slow link.

    Args:
        measure: A function of a module.
        num_ranks: How many ranks.
        seconds: A packet's latency, as of `slow_links`.
        bandwidth: Bytes a second, as of `slow_links`.
        args: What `measure` is given.
    """
    with (
        slow_links(num_ranks, seconds, bandwidth) as address,
        tempfile.TemporaryDirectory() as folder,
        RankPool(num_ranks, timeout=None, init=False, env={"GLOO_SOCKET_IFNAME": DEVICE}) as pool,
    ):
        return pool.run(_join_and_run, address, folder, measure, args)


def _join_and_run(
    address: str, folder: str, measure: Callable[..., Any], args: tuple[object, ...]
) -> Any:
    join(address, int(os.environ["RANK"]))
    start(folder)
    return measure(*args)


def start(folder: str) -> None:
    """Start torch.distributed on this rank, over gloo and a file that all ranks see."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.path.join(folder, "store"), num_ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)

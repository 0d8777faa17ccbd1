"""What a machine reaches while it trains, beside what it reaches in one operation alone."""

from __future__ import annotations

import math
import statistics
import time as clock
from collections.abc import Iterable
from dataclasses import replace

import torch

from ..compose import parallelize, shard_global_batch, train_step
from ..dist import barrier, launch
from ..models import Llama, LlamaConfig
from ..parallel.pg_manager import Grid, setup_process_group_manager
from .clusters import Cluster, Device, Link
from .describing import describe
from .description import Cut, Description
from .estimate import Time
from .layout import Layout
from .timing import time

MODEL = LlamaConfig(2048, 384, 1056, 3, 8, 8)
LENGTH, ROWS = 160, 8
STEPS, WARMING = 9, 2


def as_trained(cluster: Cluster, *, dtype: torch.dtype, backend: str = "gloo") -> Cluster:
    """Return a cluster with the figures of training: those of single operations, corrected.

    A small model takes a few steps, data parallel and then tensor parallel. By as much as its
    computing takes longer than its operations alone do (caches are cold, Python runs in between),
    the device is slower; and by as much as what is waited for takes longer than messages alone do
    (ranks are not ready at once, whatever the size), latencies are.

    Args:
        cluster: Of `calibrate`, for as many ranks as it was measured with.
        dtype: In which will be trained.
        backend: Of the ranks.

    Raises:
        RankFailedError: A rank failed.
    """
    ranks = cluster.ranks
    tp = math.gcd(ranks, MODEL.num_heads)
    apart = Layout(Grid(dp=ranks), micro_rows=ROWS)
    together = Layout(Grid(dp=ranks // tp, tp=tp), micro_rows=ROWS)
    known = describe(lambda: Llama(MODEL).to(dtype), LENGTH, cuts=[Cut(tp=tp)])
    layouts = [apart, together] if tp > 1 else [apart]
    took = [_median(launch(_train, ranks, each, dtype, backend=backend)) for each in layouts]
    planned = _planned(known, apart, cluster)
    device = _slowed(cluster.device, _longer(took[0], planned, planned.computing))
    corrected = replace(cluster, device=device)
    if tp == 1:  # nothing that computing waits for
        return corrected
    endless = replace(
        corrected, links=tuple(_slower(each, 1.0, math.inf) for each in cluster.links)
    )
    latencies = sum(_planned(known, together, endless).exposed.values())
    times = _longer(took[1], _planned(known, together, corrected), latencies)
    return replace(corrected, links=tuple(_slower(each, times, 1.0) for each in cluster.links))


def _planned(known: Description, layout: Layout, cluster: Cluster) -> Time:
    """Return what a step is planned to take without its update."""
    found = time(known, layout, cluster)
    return replace(found, step=found.step - found.update)


def _longer(took: float, planned: Time, part: float) -> float:
    """Return by which factor a part of a step takes longer, the rest as planned; 1 at least."""
    return max(1.0, (took - planned.step + part) / part) if part else 1.0


def _slowed(device: Device, times: float) -> Device:
    flops = {dtype: each / times for dtype, each in device.flops.items()}
    moving, updating = device.moving / times, device.updating or device.moving
    overhead = device.overhead * times
    return replace(device, flops=flops, moving=moving, overhead=overhead, updating=updating)


def _slower(link: Link, times: float, wider: float) -> Link:
    """Return a link of so many times the latency and the bandwidth."""
    calls = {name: (alpha * times, each * wider) for name, (alpha, each) in link.calls.items()}
    latency, bandwidth = link.latency * times, link.bandwidth * wider
    return replace(link, latency=latency, bandwidth=bandwidth, calls=calls)


def _train(layout: Layout, dtype: torch.dtype) -> list[float]:
    """Return the seconds of forwards and backwards of this rank."""
    grid = layout.grid
    manager = setup_process_group_manager(tp_size=grid.tp, dp_size=grid.dp)
    torch.manual_seed(0)
    model = parallelize(Llama(MODEL).to(dtype), manager)
    ids = torch.randint(MODEL.vocab_size, (ROWS * grid.dp, LENGTH + 1))
    whole = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    batch = shard_global_batch(whole, 1, manager, model=model)
    found = []
    for _ in range(WARMING + STEPS):
        barrier()
        begin = clock.perf_counter()
        train_step(model, batch, manager)
        found.append(clock.perf_counter() - begin)
        model.reset()
    return found[WARMING:]


def _median(ranks: Iterable[Iterable[float]]) -> float:
    """Return the median step of the slowest rank."""
    return float(statistics.median(max(each) for each in zip(*ranks, strict=True)))

"""What a machine reaches while it trains, beside what it reaches in one operation alone."""

from __future__ import annotations

import math
import statistics
import time as clock
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from ..compose import parallelize, shard_global_batch, train_step
from ..dist import barrier, launch
from ..models import Llama, LlamaConfig
from ..parallel.pg_manager import Grid, setup_process_group_manager
from .clusters import Cluster, Device, Link
from .describing import describe
from .description import Description
from .estimate import Time
from .layout import Layout
from .timing import time
from .timing.messages import in_turn

MODEL = LlamaConfig(2048, 384, 1056, 3, 8, 8)
LENGTH, ROWS = 160, 8
STEPS, WARMING = 9, 2


def as_trained(cluster: Cluster, *, dtype: torch.dtype, backend: str = "gloo") -> Cluster:
    """Return a cluster with the figures of training: those of single operations, corrected.

    A small model takes a few steps, data parallel and then tensor parallel, in groups of each size
    that has figures. By as much as its computing takes longer than its operations alone do (caches
    are cold, Python runs in between), the device is slower; and as long as a call waits that
    messages alone do not (ranks are not ready at once, whatever is sent), all calls of groups of
    that size do.

    Args:
        cluster: Of `calibrate`, for as many ranks as it was measured with.
        dtype: In which will be trained.
        backend: Of the ranks.

    Raises:
        RankFailedError: A rank failed.
    """
    ranks = cluster.ranks
    most = math.gcd(ranks, MODEL.num_heads)
    fewer = [size for size in _measured(cluster) if size < most and most % size == 0]
    layouts = [
        Layout(Grid(dp=ranks // tp, tp=tp), micro_rows=ROWS)
        for tp in sorted({1, most, *fewer}, key=lambda tp: (tp > 1, -tp))
    ]
    known = describe(
        lambda: Llama(MODEL).to(dtype), LENGTH, cuts=[layout.cut for layout in layouts],
        kernels=cluster.device.kernels,
    )  # fmt: skip
    took = [_median(launch(_train, ranks, each, dtype, backend=backend)) for each in layouts]
    planned = _planned(known, layouts[0], cluster)
    longer = max(0.0, took[0] - planned.step) / planned.computing
    device = _slowed(cluster.device, 1 + longer)
    found = replace(cluster, device=device)
    for layout, seconds in zip(layouts[1:], took[1:], strict=True):
        found = _waiting(found, known, layout, seconds, fewer)
    return found


def _measured(cluster: Cluster) -> set[int]:
    """Return the sizes of groups whose calls were measured beside those of all ranks."""
    names = (name.rpartition(" ")[2] for link in cluster.links for name in link.calls)
    return {int(size) for size in names if size.isdigit()}


def _waiting(
    cluster: Cluster, known: Description, layout: Layout, took: float, fewer: Sequence[int]
) -> Cluster:
    """Return a cluster whose calls in groups as those of a layout wait as long as its calls did.

    Ranks that share cores wait longer in some groups than in others: those sizes that have
    figures of their own (`fewer`) are corrected each by its own steps, all others together.
    """
    tp = layout.grid.tp

    def of_its(name: str) -> bool:
        size = name.rpartition(" ")[2]
        return size == str(tp) if tp in fewer else size not in map(str, fewer)

    def later(wait: float) -> Cluster:
        links = (_later(link, wait, tp, of_its, tp not in fewer) for link in cluster.links)
        return replace(cluster, links=tuple(links))

    planned = _planned(known, layout, cluster).step
    calls = _planned(known, layout, later(1.0)).step - planned  # one waits a second each
    return later(max(0.0, took - planned) / calls)


def _planned(known: Description, layout: Layout, cluster: Cluster) -> Time:
    """Return what a step is planned to take without its update."""
    found = time(known, layout, cluster)
    return replace(found, step=found.step - found.update)


def _slowed(device: Device, times: float) -> Device:
    flops = {dtype: each / times for dtype, each in device.flops.items()}
    moving, updating = device.moving / times, device.updating or device.moving
    overhead = device.overhead * times
    return replace(device, flops=flops, moving=moving, overhead=overhead, updating=updating)


def _later(link: Link, wait: float, size: int, chosen: Callable[[str], bool], others: bool) -> Link:
    """Return a link on which each chosen call of so many ranks takes longer, and `others` if asked.

    Latencies are those of a step of a call; what a call waits is shared out over its steps.
    """
    calls = {
        name: (
            alpha + wait / in_turn(name.partition(" ")[0], size - 1) if chosen(name) else alpha,
            bandwidth,
        )
        for name, (alpha, bandwidth) in link.calls.items()
    }
    return replace(link, latency=link.latency + (wait if others else 0.0), calls=calls)


def _train(layout: Layout, dtype: torch.dtype) -> list[float]:
    """Return the seconds of forwards and backwards of this rank."""
    grid = layout.grid
    manager = setup_process_group_manager(tp_size=grid.tp, dp_size=grid.dp)
    torch.manual_seed(0)
    model = parallelize(Llama(MODEL).to(dtype), manager, rehearse=False)
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

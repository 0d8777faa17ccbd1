"""A minute on this machine: what its ranks and the links between them reach, as a cluster."""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...dist import launch
from ...dist.devices import entry_of_backend
from ...dist.errors import InvalidArgumentError
from .cluster import Cluster, Device, Link, Shares
from .files import read_bench
from .measures import Figures, measure

CALLS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
_LEAST, _MOST, _FACTOR = "512", "4M", "8"  # sizes of messages
_SORTS = ("matmul", "matmul backward", "attention", "attention backward")


def calibrate(
    ranks: int = 2,
    *,
    dtype: torch.dtype = torch.float32,
    seconds: float = 0.5,
    backend: str = "gloo",
) -> Cluster:
    """Measure this machine with so many ranks, which all compute and send at once.

    Args:
        ranks: As many as will train; more than there are cores share them.
        dtype: In which will be trained.
        seconds: For each of some fifty figures, about.
        backend: Of the ranks.

    Raises:
        InvalidArgumentError: No rank.
        RankFailedError: A rank failed.
    """
    if ranks < 1:
        raise InvalidArgumentError(f"at least 1 rank is to be measured, got {ranks}")
    found = launch(measure, ranks, seconds, dtype, backend=backend)
    entry = entry_of_backend(backend)
    held = 0 if entry is None else entry.group_memory
    device = replace(_device([*found], dtype, ranks), group_memory=held)
    links = (_links(ranks, seconds, backend),) if ranks > 1 else ()
    return Cluster(ranks, device, links)


def _device(found: Sequence[Figures], dtype: torch.dtype, ranks: int) -> Device:
    """Return the device whose figures are the medians of all ranks'."""
    name = str(dtype).removeprefix("torch.")
    pairs = {sort: _medians([each[sort] for each in found]) for sort in (*_SORTS, "other")}
    peak = max(rate for sort in _SORTS for _, rate in pairs[sort])
    moving = max(rate for _, rate in pairs["other"])
    shares: dict[str, Shares] = {
        sort: tuple((size, rate / (moving if sort == "other" else peak)) for size, rate in rates)
        for sort, rates in pairs.items()
    }
    first = found[0]
    share = ranks if first["device"] == "cpu" else 1
    return Device(
        f"{platform.node()} {first['device']}", int(first["memory"]) // share, {name: peak},
        moving, _median(found, "overhead"), shares, _median(found, "updating"),
        hides=0.0 if first["device"] == "cpu" else 1.0,
        spread=max(0.05, _median(found, "spread")),
        kernels="cpu" if first["device"] == "cpu" else "cuda",
        source=f"measured with {ranks} ranks, torch {torch.__version__}",
    )  # fmt: skip


def _median(found: Sequence[Figures], name: str) -> float:
    return float(statistics.median(each[name] for each in found))


def _medians(ranks: Sequence[Sequence[tuple[float, float]]]) -> Shares:
    return tuple(
        (each[0][0], statistics.median(rate for _, rate in each))
        for each in zip(*ranks, strict=True)
    )


def _links(ranks: int, seconds: float, backend: str) -> Link:
    """Return the link between all ranks, and what smaller groups reach side by side."""
    whole = _bench(ranks, seconds, backend, "")
    calls = dict(whole.calls)
    for size in range(2, ranks):
        if ranks % size == 0:
            grid = f"tp={size},dp={ranks // size}"
            smaller = _bench(ranks, seconds, backend, grid)
            calls |= {f"{name} {size}": each for name, each in smaller.calls.items()}
    return Link(ranks, whole.latency, whole.bandwidth, calls)


def _bench(ranks: int, seconds: float, backend: str, grid: str) -> Link:
    """Return what `python -m scaletorch.dist.bench` measures."""
    with tempfile.TemporaryDirectory(prefix="scaletorch-calibrate-") as folder:
        file = Path(folder, "bench.json")
        command = [
            sys.executable, "-m", "scaletorch.dist.bench", "--ranks", str(ranks), "--calls",
            *CALLS, "--min-size", _LEAST, "--max-size", _MOST, "--factor", _FACTOR, "--seconds",
            str(seconds / 2), "--backend", backend, "--json", str(file),
        ]  # fmt: skip
        command += ["--grid", grid, "--axis", "tp"] if grid else []
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise InvalidArgumentError(f"links could not be measured: {done.stderr.strip()[-500:]}")
        return read_bench(file)

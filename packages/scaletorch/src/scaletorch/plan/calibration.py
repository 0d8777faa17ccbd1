"""Measure this machine: what its ranks reach, and the links between them, as a cluster."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time as clock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compose import parallelize, shard_global_batch, train_step
from ..dist import barrier, launch
from ..dist.devices import current_device, entry_of_backend
from ..dist.errors import InvalidArgumentError
from ..models import Llama, LlamaConfig
from ..parallel.pg_manager import Grid, setup_process_group_manager
from .clusters import Cluster, Device, Link, read_bench
from .describing import describe
from .layout import Layout
from .timing import time

CALLS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
ROUNDS, HEADS, WIDTH = 5, 4, 64
# Tokens and widths of products, lengths of attention, elements that are moved; cards need more.
SIZES = {
    "cpu": (256, (64, 256, 1024), (32, 256, 1024), (2**10, 2**17, 2**22)),
    "cuda": (4096, (256, 2048, 8192), (256, 1024, 8192), (2**14, 2**20, 2**26)),
}
UPDATED, TENSORS = 2**19, 16  # elements of each tensor that AdamW updates, and how many
MODEL = LlamaConfig(2048, 384, 1056, 3, 8, 8)  # which is trained
LENGTH, ROWS, STEPS, WARMING = 160, 8, 9, 2

Rates = list[tuple[float, float]]  # size of an operation, and its flops or bytes a second


class Figures(NamedTuple):
    """Measurements of a rank while all ranks computed.

    Attributes:
        device: Its name.
        memory: Bytes of the device.
        rates: By sort of operation.
        overhead: Seconds of an operation on hardly any data.
        updating: Bytes a second of AdamW.
        spread: By which share rounds differ.
        steps: Seconds of forward and backward of the small model, data parallel.
    """

    device: str
    memory: int
    rates: dict[str, Rates]
    overhead: float
    updating: float
    spread: float
    steps: list[float]


def calibrate(
    ranks: int = 2,
    *,
    dtype: torch.dtype = torch.float32,
    seconds: float = 0.5,
    backend: str = "gloo",
) -> Cluster:
    """Measure this machine with so many ranks, which all compute and send at once.

    Single operations and messages are measured first. Then a small model takes a few steps: by as
    much as its computing takes longer than its operations alone, the device is slower.

    Args:
        ranks: As many as will train; more than there are cores share them.
        dtype: In which will be trained.
        seconds: For each of some twenty figures, about.
        backend: Of the ranks.

    Raises:
        InvalidArgumentError: No rank.
        RankFailedError: A rank failed.
    """
    if ranks < 1:
        raise InvalidArgumentError(f"at least 1 rank is to be measured, got {ranks}")
    found = launch(_measure, ranks, seconds, dtype, backend=backend)
    links = (_link(ranks, seconds, backend),) if ranks > 1 else ()
    cluster = Cluster(ranks, _device(found, dtype, backend), links)
    took = statistics.median(max(each) for each in zip(*(f.steps for f in found), strict=True))
    return _as_trained(cluster, dtype, took)


def _device(found: Sequence[Figures], dtype: torch.dtype, backend: str) -> Device:
    """Return the device whose figures are the medians of all ranks'."""
    first, ranks = found[0], len(found)
    rates = {
        sort: [
            (size, statistics.median(each.rates[sort][at][1] for each in found))
            for at, (size, _) in enumerate(pairs)
        ]
        for sort, pairs in first.rates.items()
    }
    moving = max(rate for _, rate in rates["other"])
    peak = max(rate for sort, pairs in rates.items() if sort != "other" for _, rate in pairs)
    shares = {
        sort: tuple((size, rate / (moving if sort == "other" else peak)) for size, rate in pairs)
        for sort, pairs in rates.items()
    }
    entry, cpu = entry_of_backend(backend), first.device == "cpu"
    return Device(
        f"{platform.node()} {first.device}", first.memory // (ranks if cpu else 1),
        {str(dtype).removeprefix("torch."): peak}, moving,
        statistics.median(each.overhead for each in found), shares,
        statistics.median(each.updating for each in found), hides=0.0 if cpu else 1.0,
        spread=max(0.05, statistics.median(each.spread for each in found)),
        source=f"measured with {ranks} ranks, torch {torch.__version__}",
        group_memory=0 if entry is None else entry.group_memory, kernels="cpu" if cpu else "cuda",
    )  # fmt: skip


def _as_trained(cluster: Cluster, dtype: torch.dtype, took: float) -> Cluster:
    """Return a cluster on which a step of the small model takes as long as it took, if longer."""
    layout, device = Layout(Grid(dp=cluster.ranks), micro_rows=ROWS), cluster.device
    known = describe(lambda: Llama(MODEL).to(dtype), LENGTH, cuts=[], kernels=device.kernels)
    planned = time(known, layout, cluster)
    times = 1 + max(0.0, took - planned.step + planned.update) / planned.computing
    slower = replace(
        device, flops={name: each / times for name, each in device.flops.items()},
        moving=device.moving / times, overhead=device.overhead * times,
    )  # fmt: skip
    return replace(cluster, device=slower)


def _link(ranks: int, seconds: float, backend: str) -> Link:
    """Return what `python -m scaletorch.dist.bench` measures between all ranks."""
    with tempfile.TemporaryDirectory(prefix="scaletorch-calibrate-") as folder:
        file = Path(folder, "bench.json")
        command = [
            sys.executable, "-m", "scaletorch.dist.bench", "--ranks", str(ranks), "--calls",
            *CALLS, "--min-size", "512", "--max-size", "4M", "--factor", "8", "--seconds",
            str(seconds / 2), "--backend", backend, "--json", str(file),
        ]  # fmt: skip
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise InvalidArgumentError(f"links could not be measured: {done.stderr.strip()[-500:]}")
        return read_bench(file)


def _measure(seconds: float, dtype: torch.dtype) -> Figures:
    """Measure this rank, all ranks at once."""
    device = current_device()
    gauge = _Gauge(seconds, device)
    make = partial(torch.randn, dtype=dtype, device=device)
    small = make(8, requires_grad=True)
    overhead = gauge(lambda: small + small)
    rates: dict[str, Rates] = {}
    for sort, operations in _operations(device, make):
        for flops, run, inputs in operations:
            output = run(*inputs)
            gradient = torch.ones_like(output)
            back = partial(torch.autograd.grad, output, inputs, gradient, retain_graph=True)
            more = 2.5 if sort == "attention" else 2.0  # attention makes its scores again
            size = more * flops if sort == "attention" else flops  # of one operation
            rates.setdefault(sort, []).append((flops, flops / gauge(partial(run, *inputs))))
            rates.setdefault(f"{sort} backward", []).append((size, more * flops / gauge(back)))
    for elements in _sizes(device)[3]:
        one = make(elements)
        moved = 3.0 * one.nbytes
        took = gauge(partial(torch.add, one, one.clone()))
        rates.setdefault("other", []).append((moved, moved / max(took - overhead, 0.2 * took)))
    updating = _updating(gauge, make)
    spread = statistics.median(gauge.spreads)
    return Figures(
        str(device), _memory(device), rates, overhead, updating, spread, _train(dtype, device)
    )


def _operations(
    device: torch.device, make: Callable[..., Tensor]
) -> Iterator[tuple[str, Iterator[tuple[float, Callable[..., Tensor], list[Tensor]]]]]:
    """Yield sorts of operations, and of each flops, a call and its inputs by size."""
    tokens, widths, lengths, _ = _sizes(device)
    learned = partial(make, requires_grad=True)
    attend = partial(F.scaled_dot_product_attention, is_causal=True)
    yield (
        "matmul",
        (
            (2.0 * tokens * width**2, F.linear, [learned(tokens, width), learned(width, width)])
            for width in widths
        ),
    )
    yield (
        "attention",
        (  # half of the scores are seen
            (
                2.0 * HEADS * length**2 * WIDTH,
                attend,
                [learned(1, HEADS, length, WIDTH) for _ in range(3)],
            )
            for length in lengths
        ),
    )


def _sizes(device: torch.device) -> Any:
    return SIZES["cpu" if device.type == "cpu" else "cuda"]


class _Gauge:
    """Times calls in rounds that all ranks begin together."""

    def __init__(self, seconds: float, device: torch.device) -> None:
        self._seconds, self._device = seconds, device
        self.spreads: list[float] = []

    def __call__(self, run: Callable[[], Any]) -> float:
        """Return the median seconds of a call."""
        once = min(self._time(run, 1) for _ in range(3))
        calls = max(1, int(self._seconds / ROUNDS / max(once, 1e-7)))
        barrier()
        rounds = sorted(self._time(run, calls) for _ in range(ROUNDS))
        middle = statistics.median(rounds)
        self.spreads.append((rounds[-2] - rounds[1]) / 2 / middle)
        return middle

    def _time(self, run: Callable[[], Any], calls: int) -> float:
        self._wait()
        begin = clock.perf_counter()
        for _ in range(calls):
            run()
        self._wait()
        return (clock.perf_counter() - begin) / calls

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _updating(gauge: _Gauge, make: Callable[..., Tensor]) -> float:
    """Return bytes a second of AdamW: it reads four tensors, and writes three."""
    parameters = [nn.Parameter(make(UPDATED)) for _ in range(TENSORS)]
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    optimizer.step()
    return 7 * sum(each.nbytes for each in parameters) / gauge(optimizer.step)


def _memory(device: torch.device) -> int:
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _train(dtype: torch.dtype, device: torch.device) -> list[float]:
    """Return the seconds of forwards and backwards of this rank."""
    manager = setup_process_group_manager(dp_size=torch.distributed.get_world_size())
    torch.manual_seed(0)
    model = parallelize(Llama(MODEL).to(device, dtype), manager, rehearse=False)
    ids = torch.randint(MODEL.vocab_size, (ROWS * manager.dp_size, LENGTH + 1), device=device)
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

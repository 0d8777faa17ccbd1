"""Measure the computing speed of this machine's ranks and the links between them, as a cluster.

It takes about two minutes and writes a file for `python -m scaletorch.plan --cluster FILE`.

    python -m benchmarks.calibrating --ranks 2 --out here.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from scaletorch.dist import barrier, launch
from scaletorch.dist.devices import current_device, entry_of_backend
from scaletorch.plan import Cluster, Device, Link, write_cluster

CALLS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
HEADS, WIDTH = 4, 64  # attention heads and head size
# Tokens and widths of matmuls, sequence lengths of attention, elements to copy; GPUs need more.
SIZES = {
    "cpu": (256, (64, 256, 1024), (32, 256, 1024), (2**10, 2**17, 2**22)),
    "cuda": (4096, (256, 2048, 8192), (256, 1024, 8192), (2**14, 2**20, 2**26)),
}
DOUBTFUL = 1.0  # constants with a larger relative error are noise
UPDATED, TENSORS = 2**19, 16  # elements in each tensor that AdamW updates, number of tensors


def calibrate(
    ranks: int = 2,
    *,
    dtype: torch.dtype = torch.float32,
    seconds: float = 0.5,
    backend: str = "gloo",
) -> Cluster:
    """Measure this machine with all ranks computing and sending at the same time.

    Args:
        ranks: Number of ranks that will train; ranks beyond the number of cores share them.
        dtype: Dtype of the training.
        seconds: Approximate time for each of some twenty measurements.
        backend: Backend of the ranks.

    Raises:
        RankFailedError: A rank failed.
    """
    device = launch(_measure, ranks, seconds, dtype, backend, backend=backend)[0]
    return Cluster(ranks, device, (_link(ranks, seconds, backend),) if ranks > 1 else ())


def _link(ranks: int, seconds: float, backend: str) -> Link:
    """Return the link between all ranks, measured by `python -m scaletorch.dist.bench`."""
    with tempfile.TemporaryDirectory(prefix="scaletorch-calibrate-") as folder:
        file = Path(folder, "bench.json")
        command = [
            sys.executable, "-m", "scaletorch.dist.bench", "--ranks", str(ranks), "--calls",
            *CALLS, "--min-size", "512", "--max-size", "4M", "--factor", "8", "--seconds",
            str(seconds / 2), "--backend", backend, "--json", str(file),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return link_of(json.loads(file.read_text()))


def link_of(measured: Mapping[str, Any]) -> Link:
    """Return the link between the ranks of a file of `python -m scaletorch.dist.bench --json`."""
    calls = {
        "send" if name == "send_recv" else name:
        (each["alpha_step"], 1 / max(each["beta_bus"], 1e-15))
        for name, each in measured["constants"].items()
        if each["error"] <= DOUBTFUL
    }  # fmt: skip
    return Link(measured["conditions"]["ranks"], *calls.get("send", calls["all_reduce"]), calls)


def _measure(seconds: float, dtype: torch.dtype, backend: str) -> Device:
    """Return this rank's device, measured by all ranks at once."""
    ranks, device = torch.distributed.get_world_size(), current_device()
    cpu, spreads = device.type == "cpu", list[float]()

    def gauge(run: Callable[[], Any]) -> float:
        """Return the median seconds of a call while all ranks make it."""
        barrier()
        timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
        found = timer.blocked_autorange(min_run_time=seconds)
        spreads.append(found.iqr / 2 / found.median)
        return found.median

    make = partial(torch.randn, dtype=dtype, device=device)
    small = make(8, requires_grad=True)
    overhead = gauge(lambda: small + small)
    tokens, widths, lengths, sizes = SIZES["cpu" if cpu else "cuda"]
    rates: dict[str, list[tuple[float, float]]] = {}  # (size of the operation, rate) by kind
    for sort, flops, run, inputs in _operations(tokens, widths, lengths, make):
        output = run(*inputs)
        gradient = torch.ones_like(output)
        back = partial(torch.autograd.grad, output, inputs, gradient, retain_graph=True)
        more = 2.5 if sort == "attention" else 2.0  # attention recomputes its scores
        size = more * flops if sort == "attention" else flops  # flops of one operation
        rates.setdefault(sort, []).append((flops, flops / gauge(partial(run, *inputs))))
        rates.setdefault(f"{sort} backward", []).append((size, more * flops / gauge(back)))
    peak = max(rate for pairs in rates.values() for _, rate in pairs)
    for elements in sizes:
        one = make(elements)
        moved = 3.0 * one.nbytes
        took = gauge(partial(torch.add, one, one.clone()))
        rates.setdefault("other", []).append((moved, moved / max(took - overhead, 0.2 * took)))
    moving = max(rate for _, rate in rates["other"])
    shares = {
        sort: tuple((size, rate / (moving if sort == "other" else peak)) for size, rate in pairs)
        for sort, pairs in rates.items()
    }
    updating, entry = _updating(gauge, make), entry_of_backend(backend)
    if cpu:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    else:
        memory = int(torch.get_device_module(device).mem_get_info(device)[1])
    return Device(
        f"{platform.node()} {device}", memory,
        {str(dtype).removeprefix("torch."): peak}, moving, overhead, shares, updating,
        hides=0.0 if cpu else 1.0, spread=max(0.05, statistics.median(spreads)),
        source=f"measured with {ranks} ranks, torch {torch.__version__}",
        group_memory=0 if entry is None else entry.group_memory, kernels="cpu" if cpu else "cuda",
    )  # fmt: skip


def _operations(
    tokens: int, widths: Sequence[int], lengths: Sequence[int], make: Callable[..., Tensor]
) -> Iterator[tuple[str, float, Callable[..., Tensor], list[Tensor]]]:
    """Yield operations to time: kind, flops, function and inputs, in ascending size."""
    learned = partial(make, requires_grad=True)
    for width in widths:
        flops = 2.0 * tokens * width**2
        yield "matmul", flops, F.linear, [learned(tokens, width), learned(width, width)]
    attend = partial(F.scaled_dot_product_attention, is_causal=True)
    for length in lengths:
        flops = 2.0 * HEADS * length**2 * WIDTH  # the causal mask halves the scores
        yield "attention", flops, attend, [learned(1, HEADS, length, WIDTH) for _ in range(3)]


def _updating(gauge: Callable[[Callable[[], Any]], float], make: Callable[..., Tensor]) -> float:
    """Return AdamW's bytes a second; an update reads four tensors and writes three."""
    parameters = [nn.Parameter(make(UPDATED)) for _ in range(TENSORS)]
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    optimizer.step()
    return 7 * sum(each.nbytes for each in parameters) / gauge(optimizer.step)


def main() -> None:
    """Measure this machine, and write the file."""
    parser = argparse.ArgumentParser(description="Measure this machine, for --cluster of a plan.")
    parser.add_argument("--ranks", type=int, default=2, help="that will train (2)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--backend", default="gloo", help="of the ranks (gloo)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    given = parser.parse_args()
    cluster = calibrate(given.ranks, dtype=getattr(torch, given.dtype), backend=given.backend)
    write_cluster(cluster, given.out)
    print(f"{given.out}: {cluster.ranks} x {cluster.device.name}: {cluster.device.source}")


if __name__ == "__main__":
    main()

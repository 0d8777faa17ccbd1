"""Measure every call between ranks: latency, bandwidth, and constants of a linear cost model.

python -m scaletorch.dist.bench --ranks 2
torchrun --nproc-per-node 4 -m scaletorch.dist.bench --json four_ranks.json

As in nccl-tests, size is that of the whole buffer: each rank's tensor for all_reduce, reduce and
broadcast; the ranks' tensors together for the calls that split or join.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d
from torch.distributed import ProcessGroup

from . import dist
from .collectives.copies import barrier
from .devices import default_backend, get_comm_device
from .devices.current import synchronize
from .errors import InvalidArgumentError, ScaletorchError
from .launchers import infer_launcher
from .ranks import launch
from .startup.initialize import cleanup_dist, init_dist
from .world.info import get_backend, get_rank, get_world_size, group_ranks

ROUNDS = 5
MOST_CALLS = 500  # in one round
HEAD = f"{'call':22}{'size':>10}{'time µs':>11}{'alg GB/s':>10}{'bus GB/s':>10}{'calls':>8}"


class Case(NamedTuple):
    """The cost of one call on a ring, or with a root on a binary tree."""

    factor: Callable[[int], float]  # number of ranks → bytes on the busiest link per byte of size
    steps: Callable[[int], int]  # number of ranks → consecutive messages
    split: bool = False  # the size is divided evenly among the ranks

    def size(self, asked: int, ranks: int) -> int:
        """Round a requested size up to whole float32 elements, on each rank if it is split."""
        unit = 4 * ranks if self.split else 4
        return max(1, math.ceil(asked / unit)) * unit


Run = Callable[[], Any]
_ROOTED = Case(lambda n: 1.0, lambda n: math.ceil(math.log2(n)))
_SHARES = Case(lambda n: (n - 1) / n, lambda n: n - 1, split=True)
CASES = {
    "all_reduce": Case(lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1)),
    "reduce": _ROOTED,
    "broadcast": _ROOTED,
    **dict.fromkeys(("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"), _SHARES),
    "send_recv": Case(lambda n: 1.0, lambda n: 1),
    "barrier": Case(lambda n: 1.0, lambda n: 2 * (n - 1)),
}


def prepare(name: str, size: int, group: ProcessGroup, device: torch.device) -> Run:
    """Return a function that makes a call of `CASES` once, on `size` bytes."""
    ranks, rank = group_ranks(group), group.rank()
    whole = torch.zeros(size // 4, device=device)
    shard = torch.zeros(size // 4 // len(ranks), device=device)
    shards, received = list(whole.chunk(len(ranks))), torch.empty_like(whole)
    after, before = (ranks[(rank + step) % len(ranks)] for step in (1, -1))
    runs: dict[str, Run] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "reduce": lambda: dist.reduce(whole, ranks[0], group=group),
        "broadcast": lambda: dist.broadcast(whole, ranks[0], group),
        "all_gather": lambda: dist.all_gather(shard, group),
        "gather": lambda: dist.gather(shard, ranks[0], group),
        "scatter": lambda: dist.scatter(shard, shards, ranks[0], group),
        "reduce_scatter": lambda: dist.reduce_scatter(shard, shards, group=group),
        "all_to_all": lambda: dist.all_to_all(whole, group),
        "send_recv": lambda: dist.exchange([(whole, after)], [(received, before)], group),
        "barrier": lambda: barrier(group),
    }
    return runs[name]


class Row(NamedTuple):
    """One line of the table."""

    call: str  # name in `CASES`
    size: int  # bytes, counted as in `CASES`
    seconds: float  # of one call; the median of the rounds
    algorithm_bandwidth: float  # size / seconds, in bytes per second
    bus_bandwidth: float  # bytes per second on the busiest link
    calls: int  # in all rounds

    def __str__(self) -> str:
        widths = f"{self.algorithm_bandwidth / 1e9:10.3f}{self.bus_bandwidth / 1e9:10.3f}"
        size = f"{self.size} B"
        for exponent, unit in ((10, "KiB"), (20, "MiB"), (30, "GiB")):
            if self.size and self.size % (1 << exponent) == 0:
                size = f"{self.size >> exponent} {unit}"
        return f"{self.call:22}{size:>10}{self.seconds * 1e6:11.1f}{widths}{self.calls:8}"


def sizes_between(least: int, most: int, factor: int) -> list[int]:
    """Return sizes that grow by a factor, up to and including the largest."""
    if not 1 <= least <= most or factor < 2:
        raise InvalidArgumentError(
            "sizes must grow from at least 1 byte by a factor of at least 2; got "
            f"{least} to {most} by {factor}"
        )
    sizes = []
    while least < most:
        sizes.append(least)
        least *= factor
    return [*sizes, most]


def measure(name: str, size: int, group: ProcessGroup, seconds: float) -> Row:
    """Measure a call at one size for about `seconds`; the row is the same on every rank."""
    case, ranks, device = CASES[name], group.size(), get_comm_device(group)
    size = 0 if name == "barrier" else case.size(size, ranks)
    run = prepare(name, size, group, device)
    _time(run, 2, device)
    calls = max(1, min(MOST_CALLS, int(seconds / ROUNDS / _time(run, 3, device))))
    rounds = [_time(run, calls, device) for _ in range(ROUNDS)]
    median = statistics.median(rounds)
    bandwidth = size / median
    return Row(name, size, median, bandwidth, bandwidth * case.factor(ranks), calls * ROUNDS)


def _time(run: Run, calls: int, device: torch.device) -> float:
    """Return the slowest rank's seconds per call over consecutive calls that start together."""
    synchronize(device)
    c10d.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(device)
    seconds = (time.perf_counter() - begin) / calls
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, "max")
    return float(slowest)


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit seconds = alpha + beta · bytes; neither alpha nor beta is negative."""
    # Squares of relative errors: with absolute ones the largest sizes would dominate.
    weights = [1 / time**2 for time in seconds]
    total = sum(weights)
    centre = sum(w * x for w, x in zip(weights, sizes, strict=True)) / total
    mean = sum(w * t for w, t in zip(weights, seconds, strict=True)) / total
    spread = sum(w * (x - centre) ** 2 for w, x in zip(weights, sizes, strict=True))
    rows = list(zip(weights, sizes, seconds, strict=True))
    beta = sum(w * (x - centre) * (t - mean) for w, x, t in rows) / spread if spread else 0.0
    if beta <= 0:
        return mean, 0.0
    if mean < beta * centre:
        return 0.0, sum(w * x * t for w, x, t in rows) / sum(w * x * x for w, x, _ in rows)
    return mean - beta * centre, beta


def constants(rows: Sequence[Row], ranks: int) -> dict[str, dict[str, Any]]:
    """Return each call's constants: on these ranks it takes about alpha + beta · bytes seconds.

    Other numbers of ranks take alpha_step · steps + beta_bus · factor · bytes. `error` is the root
    mean square of the relative errors.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row.call for row in rows):
        measured, case = [row for row in rows if row.call == name], CASES[name]
        alpha, beta = fit([row.size for row in measured], [row.seconds for row in measured])
        squares = [((alpha + beta * row.size) / row.seconds - 1) ** 2 for row in measured]
        found[name] = {
            "alpha": alpha,
            "beta": beta,
            "alpha_step": alpha / case.steps(ranks),
            "beta_bus": beta / case.factor(ranks),
            "error": math.sqrt(sum(squares) / len(squares)),
        }
    return found


def measure_all(arguments: argparse.Namespace, show: Callable[[object], None]) -> dict[str, Any]:
    """Measure all calls, and show each row; every rank calls this."""
    group = c10d.group.WORLD
    if group is None or group.size() < 2:
        message = f"calls are measured between ranks, and the group has {get_world_size(group)}"
        raise InvalidArgumentError(message)
    show(HEAD)
    rows: list[Row] = []
    for name in arguments.calls:
        sizes = sizes_between(arguments.min_size, arguments.max_size, arguments.factor)
        for size in [0] if name == "barrier" else sizes:
            rows.append(measure(name, size, group, arguments.seconds))
            show(rows[-1])
    conditions = {
        "ranks": group.size(),
        "backend": get_backend(group),
        "device": get_comm_device(group).type,
        "torch": torch.__version__,
    }
    written = [row._asdict() for row in rows]
    return {"conditions": conditions, "rows": written, "constants": constants(rows, group.size())}


def report(arguments: argparse.Namespace) -> None:
    """Measure on this rank; global rank 0 prints the table and writes the file."""
    init_dist(backend=arguments.backend or default_backend())
    try:
        first = get_rank() == 0
        result = measure_all(arguments, _print if first else lambda line: None)
    finally:
        cleanup_dist()
    if first and arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1))


def _print(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def size(text: str) -> int:
    """Parse a number of bytes, such as 8, 64K or 1G."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 8, 64K, 64M or 1G")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command, on new local ranks or as one of a launcher's ranks."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument  # torchrun would read --max as --max-restarts
    add("--ranks", type=int, metavar="N", help="start N ranks here; else a launcher has")
    add("--calls", nargs="+", choices=list(CASES), default=list(CASES), metavar="CALL",
        help=f"of {', '.join(CASES)}; all by default")  # fmt: skip
    add("--min-size", type=size, default=8, metavar="SIZE", help="smallest size (8)")
    add("--max-size", type=size, default=64 << 20, metavar="SIZE", help="largest size (64M)")
    add("--factor", type=int, default=8, metavar="N", help="between sizes (8)")
    add("--seconds", type=float, default=0.25, metavar="S", help="for each call and size (0.25)")
    add("--backend", help="such as gloo or nccl; this machine's device's by default")
    add("--json", metavar="FILE", help="write rows and constants")
    chosen = parser.parse_args(arguments)
    if chosen.ranks is None and infer_launcher() == "none":
        parser.error("start it with a launcher (torchrun, srun, mpirun), or give --ranks")
    try:
        sizes_between(chosen.min_size, chosen.max_size, chosen.factor)
        if chosen.ranks is None:
            report(chosen)
        else:
            launch(report, chosen.ranks, chosen, init=False)
    except ScaletorchError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()

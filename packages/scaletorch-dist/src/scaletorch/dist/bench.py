"""Measure every call between ranks: latency, bandwidth, and constants of a linear cost model.

python -m scaletorch.dist.bench --ranks 2
torchrun --nproc-per-node 4 -m scaletorch.dist.bench --grid tp=2,dp=2 --axis tp --json tp.json

As in nccl-tests, size is that of the whole buffer: each rank's tensor for all_reduce, reduce and
broadcast; the ranks' tensors together for the calls that split or join.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import ProcessGroup

from . import dist
from .collectives.barrier import barrier
from .devices import default_backend, get_comm_device
from .devices.current import synchronize
from .errors import InvalidArgumentError, ScaletorchError
from .launchers.environment import infer_launcher
from .ranks import launch
from .startup.initialize import cleanup_dist, init_dist
from .world.info import get_backend, get_rank, get_timeout, get_world_size, group_ranks

ORDER = ("dp", "pp", "cp", "tp")  # axes of a grid: consecutive ranks differ in the last one
ROUNDS = 5
MOST_CALLS = 500  # in one round
DOUBTFUL = 0.3  # constants with larger relative errors are noise
HEAD = (
    f"{'call':22}{'size':>10}{'time µs':>11}{'least µs':>11}{'alg GB/s':>10}{'bus GB/s':>10}"
    f"{'calls':>8}"
)
Run = Callable[[], Any]


class Case(NamedTuple):
    """The cost of one call on a ring.

    Attributes:
        factor: Number of ranks → bytes on the busiest link per byte of size.
        steps: Number of ranks → consecutive messages, on a ring or (rooted calls) a binary tree.
        split: Whether the size is divided evenly among the ranks.
    """

    factor: Callable[[int], float]
    steps: Callable[[int], int]
    split: bool = False

    def size(self, asked: int, ranks: int) -> int:
        """Round a requested size up to whole float32 elements, on each rank if it is split."""
        unit = 4 * ranks if self.split else 4
        return max(1, math.ceil(asked / unit)) * unit


_ROOTED = Case(lambda n: 1.0, lambda n: math.ceil(math.log2(n)))
_SHARES = Case(lambda n: (n - 1) / n, lambda n: n - 1, split=True)
_MESSAGE = Case(lambda n: 1.0, lambda n: 1)
CASES = {
    "all_reduce": Case(lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1)),
    "reduce": _ROOTED,
    "broadcast": _ROOTED,
    **dict.fromkeys(("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"), _SHARES),
    "send_recv": _MESSAGE,
    "ping_pong": _MESSAGE,
    "barrier": Case(lambda n: 1.0, lambda n: 2 * (n - 1)),
}


class Place(NamedTuple):
    """The place of a measurement: a group, this rank in it, and the device of its tensors."""

    group: ProcessGroup
    rank: int
    ranks: tuple[int, ...]
    device: torch.device

    def call(self, name: str, size: int) -> Run:
        """Return a function that makes a call of `CASES` once, on `size` bytes."""
        group, root, count = self.group, self.ranks[0], len(self.ranks)
        whole = torch.zeros(size // 4, device=self.device)
        own = torch.zeros(size // 4 // count, device=self.device)
        parts, received = list(whole.chunk(count)), torch.empty_like(whole)
        after, before = (self.ranks[(self.rank + step) % count] for step in (1, -1))
        runs: dict[str, Run] = {
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
            "reduce": lambda: dist.reduce(whole, root, group=group),
            "broadcast": lambda: dist.broadcast(whole, root, group),
            "all_gather": lambda: dist.all_gather(own, group),
            "gather": lambda: dist.gather(own, root, group),
            "scatter": lambda: dist.scatter(own, parts, root, group),
            "reduce_scatter": lambda: dist.reduce_scatter(own, parts, group=group),
            "all_to_all": lambda: dist.all_to_all(whole, group),
            "send_recv": lambda: dist.exchange([(whole, after)], [(received, before)], group),
            "ping_pong": lambda: self._ping_pong(whole),
            "barrier": lambda: barrier(group),
        }
        return runs[name]

    def _ping_pong(self, data: Tensor) -> None:
        """Send a message between the first two ranks and back; one way takes half the time."""
        first, second, *_ = self.ranks
        if self.rank == 0:
            dist.send(data, second, self.group)
            dist.recv(data, second, self.group)
        elif self.rank == 1:
            dist.recv(data, first, self.group)
            dist.send(data, first, self.group)


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        call: Name in `CASES`.
        size: Bytes, counted as in `CASES`.
        seconds: Time of one call; the median of the rounds.
        least: Time of one call in the fastest round.
        algorithm_bandwidth: Size / seconds, in bytes per second.
        bus_bandwidth: Bytes per second on the busiest link.
        calls: Number of calls in all rounds.
    """

    call: str
    size: int
    seconds: float
    least: float
    algorithm_bandwidth: float
    bus_bandwidth: float
    calls: int

    def __str__(self) -> str:
        """Return a line of the table."""
        times = f"{self.seconds * 1e6:11.1f}{self.least * 1e6:11.1f}"
        widths = f"{self.algorithm_bandwidth / 1e9:10.3f}{self.bus_bandwidth / 1e9:10.3f}"
        size = f"{self.size} B"
        for exponent, unit in ((10, "KiB"), (20, "MiB"), (30, "GiB")):
            if self.size and self.size % (1 << exponent) == 0:
                size = f"{self.size >> exponent} {unit}"
        return f"{self.call:22}{size:>10}{times}{widths}{self.calls:8}"


def parse_grid(text: str) -> dict[str, int]:
    """Parse a grid such as `tp=2,dp=2`; return the axes in the order of the grid.

    Raises:
        InvalidArgumentError: An axis is unknown or occurs twice, or a size is invalid.
    """
    sizes: dict[str, int] = {}
    for entry in text.split(","):
        name, _, size = entry.strip().partition("=")
        if name not in ORDER or name in sizes or not size.isdigit() or int(size) < 1:
            message = (
                f"--grid needs axes such as tp=2,dp=2, each of {', '.join(ORDER)} at most once, "
                f"got {text!r}"
            )
            raise InvalidArgumentError(message)
        sizes[name] = int(size)
    return {name: sizes[name] for name in ORDER if name in sizes}


def axis_group(grid: dict[str, int], axis: str) -> ProcessGroup:
    """Return this rank's group along an axis; every rank of the world calls this.

    Raises:
        InvalidArgumentError: The grid lacks the axis, or its size is not the world size.
    """
    world, count = get_world_size(), math.prod(grid.values())
    if axis not in grid:
        raise InvalidArgumentError(f"--axis {axis} is not in the grid, which has {', '.join(grid)}")
    if count != world:
        sizes = " * ".join(map(str, grid.values()))
        raise InvalidArgumentError(f"the grid needs {sizes} = {count} ranks, the world has {world}")
    place = list(grid).index(axis)
    ranks = torch.arange(world).view(*grid.values()).movedim(place, -1).reshape(-1, grid[axis])
    groups = [c10d.new_group(members, timeout=get_timeout()) for members in ranks.tolist()]
    return next(group for group in groups if isinstance(group, ProcessGroup) and group.rank() >= 0)


def sizes_between(least: int, most: int, factor: int) -> list[int]:
    """Return sizes that grow by a factor, up to and including the largest.

    Raises:
        InvalidArgumentError: The range is empty, or the factor is below 2.
    """
    if not 1 <= least <= most or factor < 2:
        message = f"sizes grow from 1 byte or more, by 2 or more: got {least} to {most} by {factor}"
        raise InvalidArgumentError(message)
    sizes = []
    while least < most:
        sizes.append(least)
        least *= factor
    return [*sizes, most]


def measure(name: str, size: int, place: Place, seconds: float) -> Row:
    """Measure a call at one size for about `seconds`; the row is the same on every rank."""
    case, ranks = CASES[name], len(place.ranks)
    size = 0 if name == "barrier" else case.size(size, ranks)
    run = place.call(name, size)
    _time(run, 2, place)
    calls = max(1, min(MOST_CALLS, int(seconds / ROUNDS / _time(run, 3, place))))
    rounds = [_time(run, calls, place) for _ in range(ROUNDS)]
    share = 2 if name == "ping_pong" else 1  # there and back
    median, least = statistics.median(rounds) / share, min(rounds) / share
    bandwidth = size / median
    return Row(name, size, median, least, bandwidth, bandwidth * case.factor(ranks), calls * ROUNDS)


def _time(run: Run, calls: int, place: Place) -> float:
    """Return the seconds per call over `calls` consecutive calls that all ranks start together.

    It is the time of the slowest rank in the world: groups along an axis run at the same time.
    """
    synchronize(place.device)
    c10d.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(place.device)
    own = (time.perf_counter() - begin) / calls
    slowest = torch.tensor(own, dtype=torch.float64, device=get_comm_device())
    dist.all_reduce(slowest, "max")
    return float(slowest)


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit seconds = alpha + beta · bytes; neither alpha nor beta is negative.

    The fit minimizes the squares of the *relative* errors: with absolute errors the largest sizes
    would dominate, and alpha would be their noise.
    """
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
    """Return the constants of each call for a planner.

    Returns:
        By call: `alpha` (seconds) and `beta` (seconds per byte of the call's size) for this number
        of ranks; `alpha_step` and `beta_bus`, the same per step of the algorithm and per byte on
        the busiest link, to predict other numbers of ranks by seconds = alpha_step · steps +
        beta_bus · factor · bytes; the `steps` and `factor` used; and `error`, the root mean square
        of the relative errors.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row.call for row in rows):
        own, case = [row for row in rows if row.call == name], CASES[name]
        alpha, beta = fit([row.size for row in own], [row.seconds for row in own])
        squares = [((alpha + beta * row.size) / row.seconds - 1) ** 2 for row in own]
        steps, factor = case.steps(ranks), case.factor(ranks)
        found[name] = {
            "alpha": alpha,
            "beta": beta,
            "alpha_step": alpha / steps,
            "beta_bus": beta / factor,
            "steps": steps,
            "factor": factor,
            "error": math.sqrt(sum(squares) / len(squares)),
        }
    return found


def constants_text(constants: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of constants."""
    yield f"{'call':22}{'alpha µs':>11}{'1/beta GB/s':>13}{'error':>8}"
    for call, found in constants.items():
        beta = found["beta"]
        width = f"{1e-9 / beta:13.3f}" if beta else f"{'-':>13}"
        doubt = "  do not use: noise" if found["error"] > DOUBTFUL else ""
        yield f"{call:22}{found['alpha'] * 1e6:11.1f}{width}{found['error']:8.0%}{doubt}"


def run(given: argparse.Namespace, tell: Callable[[Iterable[Any]], None]) -> dict[str, Any]:
    """Measure all calls; every rank of the world calls this.

    Args:
        given: The command's options, the same on every rank.
        tell: Called with each new row, in a list.

    Returns:
        Conditions, rows and constants, in seconds and bytes.
    """
    grid = parse_grid(given.grid) if given.grid else {}
    group = axis_group(grid, given.axis) if grid else c10d.group.WORLD
    if group is None or group.size() < 2:
        message = f"calls are measured between ranks, and the group has {get_world_size(group)}"
        raise InvalidArgumentError(message)
    place = Place(group, group.rank(), group_ranks(group), get_comm_device(group))
    rows: list[Row] = []
    for name in given.calls:
        sizes = sizes_between(given.min_size, given.max_size, given.factor)
        for size in [0] if name == "barrier" else sizes:
            rows.append(measure(name, size, place, given.seconds))
            tell(rows[-1:])
    conditions = {
        "ranks": len(place.ranks),
        "world": get_world_size(),
        **({"grid": given.grid, "axis": given.axis} if given.grid else {}),
        "backend": get_backend(place.group),
        "device": place.device.type,
        "torch": torch.__version__,
        "host": platform.node(),
        "cores": os.cpu_count(),
    }
    written = [row._asdict() for row in rows]
    return {"conditions": conditions, "rows": written, "constants": constants(rows, group.size())}


def report(given: argparse.Namespace) -> None:
    """Measure on this rank; global rank 0 prints the tables and writes the file."""
    joined = not c10d.is_initialized()
    if joined:
        init_dist(backend=given.backend or default_backend())
    try:
        tell = _say if get_rank() == 0 else lambda lines: None
        tell([HEAD])
        result = run(given, tell)
    finally:
        if joined:
            cleanup_dist()
    conditions = ", ".join(f"{name} {value}" for name, value in result["conditions"].items())
    tell(["", conditions, "", *constants_text(result["constants"])])
    if given.json and tell is _say:
        Path(given.json).write_text(json.dumps(result, indent=1))


def _say(lines: Iterable[Any]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def size(text: str) -> int:
    """Parse a number of bytes, such as 8, 64K or 1G."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 8, 64K, 64M or 1G")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command, on new local ranks or as one of a launcher's ranks."""
    reads = argparse.ArgumentParser(
        prog=f"python -m {__package__}.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = reads.add_argument  # torchrun would read --max as --max-restarts
    add("--ranks", type=int, metavar="N", help="start N ranks here; else a launcher has")
    add("--calls", nargs="+", choices=list(CASES), default=list(CASES), metavar="CALL",
        help=f"of {', '.join(CASES)}; all by default")  # fmt: skip
    add("--min-size", type=size, default=8, metavar="SIZE", help="smallest size (8)")
    add("--max-size", type=size, default=64 << 20, metavar="SIZE", help="largest size (64M)")
    add("--factor", type=int, default=8, metavar="N", help="between sizes (8)")
    add("--seconds", type=float, default=0.25, metavar="S", help="for each call and size (0.25)")
    add("--backend", help="such as gloo or nccl; this machine's device's by default")
    add("--grid", default="", metavar="AXES", help="such as tp=2,dp=2: groups along --axis")
    add("--axis", default="", help="of the grid")
    add("--json", metavar="FILE", help="write rows and constants")
    given = reads.parse_args(arguments)
    if bool(given.grid) != bool(given.axis):
        reads.error("--grid and --axis go together")
    if given.ranks is None and infer_launcher() == "none":
        reads.error("start it with a launcher (torchrun, srun, mpirun), or give --ranks")
    try:
        sizes_between(given.min_size, given.max_size, given.factor)
        if given.ranks is None:
            report(given)
        else:
            launch(report, given.ranks, given, init=False)
    except ScaletorchError as error:
        reads.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()

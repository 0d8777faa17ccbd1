"""What the layouts of a job would cost, and why one is taken before others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from job import Division, Job, divide
from memory import Memory, largest
from traffic import Sent, seconds, sent

from scaletorch.parallel.pg_manager import Grid, legal_layouts
from scaletorch.parallel.pipeline_parallel import Costs, simulate
from scaletorch.pretrain.flops import flops_per_token

GIB = 2**30


class Machine(NamedTuple):
    """What ranks run on.

    Attributes:
        memory: Bytes of a rank.
        flops: Floating-point operations a second of a rank.
        per_node: Ranks of a node.
        latency: Seconds of a message.
        inside: Bytes a second between ranks of a node.
        between: Bytes a second between ranks of different nodes.
    """

    memory: float
    flops: float
    per_node: int
    latency: float
    inside: float
    between: float


class Candidate(NamedTuple):
    """A legal layout and what it costs: memory of its fullest rank, seconds of its slowest."""

    division: Division
    memory: Memory
    sent: dict[str, Sent]
    bubble: float
    computing: float
    sending: float

    @property
    def time(self) -> float:
        """Seconds of a step, by the estimate."""
        return self.computing + self.sending


def candidates(job: Job, ranks: int, machine: Machine) -> tuple[list[Candidate], dict[str, str]]:
    """Return the legal layouts, quickest first, and the others with what is wrong with them."""
    found, refused = [], {}
    for grid in legal_layouts(ranks):
        try:
            found.append(evaluate(divide(job, grid), machine))
        except ValueError as error:
            refused[name(grid)] = str(error).partition("\n")[0]
    return sorted(found, key=lambda each: each.time), refused


def evaluate(division: Division, machine: Machine) -> Candidate:
    """Estimate one layout."""
    job, grid = division.job, division.grid
    layers = [float(division.num_layers(stage)) for stage in range(grid.pp)]
    bubble = simulate(division.schedule(), Costs(stages=layers)).bubble
    work = flops_per_token(job.config, job.length) * job.rows * job.length
    computing = work / grid.world_size / machine.flops / (1 - bubble)
    each_stage = [sent(division, stage) for stage in range(grid.pp)]
    times = [sending(grid, traffic, machine) for traffic in each_stage]
    slowest = max(range(grid.pp), key=times.__getitem__)
    memory = largest(division)[1]
    return Candidate(division, memory, each_stage[slowest], bubble, computing, times[slowest])


def sending(grid: Grid, traffic: dict[str, Sent], machine: Machine) -> float:
    """Return the seconds of a rank's messages, each over the slowest link of its group."""
    total = 0.0
    for axis, own in traffic.items():
        groups = grid.groups("cp_dp" if axis == "dp" else axis)
        crossing = any(len({rank // machine.per_node for rank in group}) > 1 for group in groups)
        bandwidth = machine.between if crossing else machine.inside
        total += seconds({axis: own}, machine.latency, bandwidth)
    return total


def reasons(best: Candidate, all_legal: Sequence[Candidate], machine: Machine) -> Iterator[str]:
    """Say why a layout was taken before others."""
    grid = best.division.grid
    yield (
        f"its fullest rank needs {best.memory.total / GIB:.2f} of {machine.memory / GIB:g} GiB"
        f" ({best.memory.activations / best.memory.total:.0%} of that are activations)"
    )
    quicker = [each for each in all_legal if each.time < best.time]
    if quicker:
        first = quicker[0]
        yield (
            f"{len(quicker)} quicker ones do not fit, such as {name(first.division.grid)}, which "
            f"needs {first.memory.total / GIB:.2f} GiB"
        )
    if grid.tp > 1:
        where = "stays inside a node" if grid.tp <= machine.per_node else "crosses nodes"
        yield f"tp {grid.tp}, which sends with every layer, {where}"
    if grid.pp > 1:
        yield (
            f"its pipeline waits for {best.bubble:.0%} of the time, with "
            f"{best.division.micro_batches} micro-batches on {grid.pp} stages"
        )
    share = best.sending / best.time
    yield f"messages would be {share:.0%} of the step if none hid behind computation"


def name(grid: Grid) -> str:
    """Write a layout, DP x PP x CP x TP."""
    return f"{grid.dp}x{grid.pp}x{grid.cp}x{grid.tp}"

"""Choosing a layout: which of the legal ones fit, what each sends, and which to try first.

``python examples/layout/choose.py --ranks 16`` takes the sizes of a Llama-style model and of its
batch, and lists for each layout the memory of its fullest rank, the bytes that a rank sends in a
step over each axis, the pipeline's bubble, and from these an estimate of the step. Nothing is
started and nothing is allocated: shapes and collectives are what `explain` says of the model on
the meta device, attention's bytes are `volumes`, messages and activations of a pipeline are those
of its checked schedule. The tests hold memory and bytes against real ranks.

The time is an estimate of one kind only: computation at ``--flops`` without what the pipeline waits
for, plus all messages at the link's latency and bandwidth, as if none hid behind computation. It is
good for an order, not for a promise. Measure links with ``python -m scaletorch.dist.bench --json
FILE`` and give ``--constants FILE``; then measure the first few layouts themselves.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from job import Division, Job, divide
from memory import Memory, largest
from traffic import Sent, seconds, sent

from scaletorch.models import LlamaConfig
from scaletorch.parallel.pg_manager import Grid, legal_layouts
from scaletorch.parallel.pipeline_parallel import Costs, simulate
from scaletorch.pretrain.flops import flops_per_token

GIB, MIB = 2**30, 2**20


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
        group = grid.group("cp_dp" if axis == "dp" else axis, 0)
        one_node = len({rank // machine.per_node for rank in group}) == 1
        bandwidth = machine.inside if one_node else machine.between
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


def table(shown: Sequence[Candidate], machine: Machine) -> Iterator[str]:
    """Yield a line for each layout."""
    yield (
        f"{'DPxPPxCPxTP':12}{'GiB':>8}{'params':>8}{'grads':>8}{'state':>8}{'activ.':>8}"
        f"{'MiB: tp':>10}{'cp':>8}{'pp':>8}{'dp':>8}{'bubble':>8}{'ms':>10}"
    )
    for each in shown:
        sizes = (each.memory.total, *each.memory)
        held = "".join(f"{size / GIB:8.2f}" for size in sizes)
        wire = [f"{own.bytes / MIB:.0f}" for own in each.sent.values()]
        moved = f"{wire[0]:>10}" + "".join(f"{own:>8}" for own in wire[1:])
        note = "" if each.memory.total <= machine.memory else "  does not fit"
        estimate = f"{each.bubble:8.0%}{each.time * 1e3:10.1f}"
        yield f"{name(each.division.grid):12}{held}{moved}{estimate}{note}"


def read_constants(path: Path) -> tuple[float, float]:
    """Return latency and bandwidth of a link, of what `scaletorch.dist.bench` measured."""
    measured = json.loads(path.read_text())["constants"]["all_reduce"]
    return measured["alpha_step"], 1 / measured["beta_bus"]


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    reads = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, value, what in (
        ("ranks", 16, "of the world"), ("hidden", 1024, "size"), ("intermediate", 2816, "size"),
        ("layers", 16, "of the model"), ("heads", 16, "of queries"), ("kv-heads", 8, "of keys"),
        ("vocab", 32000, "size"), ("length", 2048, "tokens of a sequence"),
        ("rows", 64, "sequences of a global batch"), ("micro-rows", 1, "of a micro-batch"),
        ("zero", 0, "1 shards the optimizer's state"), ("per-node", 8, "ranks of a node"),
        ("show", 8, "layouts in the table"),
    ):  # fmt: skip
        reads.add_argument(f"--{option}", type=int, default=value, help=f"{what} ({value})")
    for option, number, what in (
        ("memory", 16.0, "GiB of a rank"), ("flops", 1e13, "of a rank, a second"),
        ("latency", 20e-6, "seconds of a message"),
        ("inside", 50e9, "bytes a second in a node"), ("between", 10e9, "and between nodes"),
    ):  # fmt: skip
        reads.add_argument(f"--{option}", type=float, default=number, help=f"{what} ({number:g})")
    reads.add_argument("--constants", type=Path, help="of scaletorch.dist.bench, for all links")
    return reads


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of layouts, and which to try first."""
    given = parser().parse_args(arguments)
    config = LlamaConfig(
        given.vocab, given.hidden, given.intermediate, given.layers, given.heads, given.kv_heads
    )
    job = Job(config, given.length, given.rows, given.micro_rows, zero=given.zero)
    links = (given.latency, given.inside, given.between)
    if given.constants:
        latency, bandwidth = read_constants(given.constants)
        links = (latency, bandwidth, bandwidth)
    machine = Machine(given.memory * GIB, given.flops, given.per_node, *links)
    legal, refused = candidates(job, given.ranks, machine)
    fitting = [each for each in legal if each.memory.total <= machine.memory]
    print(
        f"{len(legal) + len(refused)} layouts of {given.ranks} ranks: {len(refused)} not legal, "
        f"{len(fitting)} of {len(legal)} fit in {given.memory:g} GiB a rank. Assumed: "
        f"{given.flops:.3g} FLOP/s, {links[0] * 1e6:.3g} µs, {links[1]:.3g} and {links[2]:.3g} B/s"
        "\n"
    )
    print(*table((fitting or legal)[: given.show], machine), sep="\n")
    for layout, why in list(refused.items())[:3]:
        print(f"not legal: {layout}: {why}")
    if fitting:
        print(f"\ntry {name(fitting[0].division.grid)} (DP x PP x CP x TP) first:")
        print(*(f"- {each}" for each in reasons(fitting[0], legal, machine)), sep="\n")
    else:
        print("\nnone fits: take more ranks, fewer --micro-rows, or --zero 1")


if __name__ == "__main__":
    main()

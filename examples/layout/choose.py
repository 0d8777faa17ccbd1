"""Choosing a layout: which of the legal ones fit, what each sends, and which to try first.

``python examples/layout/choose.py --ranks 16`` takes the sizes of a Llama-style model and of its
batch, and lists for each layout the memory of its fullest rank, the bytes that a rank sends in a
step over each axis, the pipeline's bubble, and from these an estimate of the step. Nothing is
started and nothing is allocated: shapes and collectives are what `explain` says of the model on
the meta device, attention's bytes are `volumes`, messages and activations of a pipeline are those
of its checked schedule. The tests hold them against real ranks: bytes of parameters, gradients,
optimizer state and messages exactly, activations within 5 %.

The time is an estimate: computation at ``--flops``, longer by the pipeline's bubble, plus all
messages at the link's latency and bandwidth, as if none hid behind computation. It is good for an
order, not for a promise. Measure links with ``python -m scaletorch.dist.bench --json FILE`` and
give ``--constants FILE``; then measure the first few layouts themselves.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from estimate import GIB, Candidate, Machine, candidates, name, reasons
from job import Job

from scaletorch.models import LlamaConfig

MIB = 2**20


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
    return measured["alpha_step"], 1 / max(measured["beta_bus"], 1e-15)


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
        ("tie", 0, "1 makes the embedding the head"), ("zero", 0, "1 shards the optimizer's state"),
        ("per-node", 8, "ranks of a node"), ("show", 8, "layouts in the table"),
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
    sizes = (given.vocab, given.hidden, given.intermediate, given.layers)
    heads = (given.heads, given.kv_heads)
    config = LlamaConfig(*sizes, *heads, tie_embeddings=bool(given.tie))
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

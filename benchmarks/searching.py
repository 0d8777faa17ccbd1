"""Time to find the best of all legal layouts of 1,024 and of 16,384 ranks.

Two models of 126 layers, dense and a mixture, with tp and cp up to 32 and four sizes of ep.
The figure is CPU seconds, the least of several searches, each in a new process.

    python -m benchmarks.searching

Layers are described in cuts of 1 and 2 ranks along each axis; wider cuts scale those figures.
The time of a search does not depend on the size of the figures, and running 330 cuts would take
minutes.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import nn

from scaletorch.models import Llama, LlamaConfig, Mixture, MixtureConfig
from scaletorch.plan import (
    Affine,
    Behaviour,
    Block,
    Cut,
    Description,
    Parameter,
    cluster_named,
    describe,
    plan,
    usual_cuts,
)

from .harness.tables import machine, parser, publish, row, table

RANKS = (1024, 16384)
SIZES, EXPERTS, LAYERS, LENGTH = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8), 126, 8192
ROWS = 4  # for each rank: every size of dp divides the total, with every micro-batch
SHRINKING = ("kept", "entered", "forward_peak", "backward_peak", "handed")


def dense() -> nn.Module:
    """Return Llama 3 405B with two layers."""
    return Llama(
        LlamaConfig(128256, 16384, 53248, num_layers=2, num_heads=128, num_kv_heads=8)
    ).bfloat16()


def mixture() -> nn.Module:
    """Return a mixture of 64 experts with two layers."""
    return Mixture(
        MixtureConfig(
            128256, 8192, 2048, num_layers=2, num_heads=64, num_kv_heads=8, num_experts=64
        )
    ).bfloat16()


def described(name: str) -> Description:
    """Return a model of `LAYERS` layers in cuts of all sizes."""
    build, experts = {"dense": (dense, (1,)), "mixture": (mixture, EXPERTS)}[name]
    few = usual_cuts(8, tp=(1, 2), cp=(1, 2), ep=experts[:2])
    known = describe(build, LENGTH, cuts=few, name=name)
    first, layer, *_, last = known.blocks
    layers = (Block(f"layers.{at}", layer.kind, "layer") for at in range(LAYERS))
    cuts = usual_cuts(1024, tp=SIZES, cp=SIZES, ep=experts)
    return replace(
        known, blocks=(first, *layers, last), cuts={cut: widened(known, cut) for cut in cuts}
    )


def widened(known: Description, cut: Cut) -> tuple[Behaviour, ...]:
    """Return the kinds in a cut, scaled from the described cut with sizes of at most 2."""
    near = replace(cut, tp=min(cut.tp, 2), cp=min(cut.cp, 2), ep=min(cut.ep, 2))
    share = near.tp * near.cp / (cut.tp * cut.cp)

    def of(number: Affine) -> Affine:
        return Affine(number.fixed * share, number.per_row * share)

    def parameter(each: Parameter) -> Parameter:
        ranks = cut.ep if each.expert and cut.ep > 1 else cut.tp
        own = each.elements if each.local == each.elements else each.elements // ranks
        return replace(each, local=own)

    return tuple(
        replace(
            kind,
            parameters=tuple(map(parameter, kind.parameters)),
            sent=tuple(replace(sent, bytes=of(sent.bytes)) for sent in kind.sent),
            work=tuple(replace(w, flops=of(w.flops), moved=of(w.moved)) for w in kind.work),
            **{name: of(getattr(kind, name)) for name in SHRINKING},
        )
        for kind in known.behaviours(near)
    )


def search(known: Description, ranks: int) -> tuple[float, int, int]:
    """Return the CPU seconds of a search, and the numbers of legal layouts and refused grids."""
    cluster = cluster_named("H100-SXM", ranks)
    begin = time.process_time()
    found = plan(known, ROWS * ranks, cluster)
    found.best()
    return time.process_time() - begin, len(found.legal), len(found.illegal)


def lines(names: list[str], repeats: int) -> Iterator[str]:
    """Yield the table, a row for each model and number of ranks."""
    yield f"{machine()}; processor seconds, the least of {repeats} searches\n"
    yield table(["model", "ranks", "seconds", "layouts", "refused grids"], [])
    # Not by fork: descriptions leave address space that the system may refuse to copy.
    fresh = multiprocessing.get_context("spawn")
    for name in names:
        known = described(name)
        for ranks in RANKS:
            with fresh.Pool(1, maxtasksperchild=1) as pool:
                each = [pool.apply(search, (known, ranks)) for _ in range(repeats)]
            took, legal, refused = min(each)
            yield row(name, f"{ranks:,}", f"{took:.2f}", f"{legal:,}", f"{refused:,}")


def main() -> None:
    """Print the table."""
    command = parser(__doc__)
    command.add_argument("--models", nargs="+", choices=["dense", "mixture"])
    command.add_argument("--repeats", type=int, default=5, help="searches of each sort (5)")
    command.add_argument("--out", type=Path, help="a file for the table")
    given = command.parse_args()
    publish(lines(given.models or ["dense", "mixture"], given.repeats), given.out)


if __name__ == "__main__":
    main()

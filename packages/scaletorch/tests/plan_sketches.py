"""Models and clusters made by hand, for plans of them."""

from scaletorch.parallel.pipeline_parallel import SCHEDULES
from scaletorch.plan import (
    Affine,
    Behaviour,
    Block,
    Cluster,
    Cut,
    Description,
    Device,
    Link,
    Parameter,
    Sent,
    Work,
)
from scaletorch.plan.description import CHUNKS

TRAINING = [(name, CHUNKS.get(name, 1)) for name in SCHEDULES if name != "forward_only"]


def model(cuts, layers, name="toy", length=8, **more):
    """Return a first block, equal layers and a last block; `cuts` describes the three in each."""
    blocks = (
        Block("e", 0, "first"),
        *(Block(f"<{at}>", 1, "layer") for at in range(layers)),
        Block("h", 2, "last"),
    )
    return Description(name, length, "float32", blocks, cuts, **more)


def sketch(layers=8, tied=False, tps=(1, 2, 4), cps=(1, 2, 4)):
    """Return a model whose layers keep 1,000 bytes a row and hand on 40."""
    cuts = {
        Cut(tp, cp, cp_method="ring" if cp > 1 else ""): kinds(tp, cp) for tp in tps for cp in cps
    }
    ties = (("0.e", "2.h"),) if tied else ()
    return model(cuts, layers, "sketch", 16, tied=ties)


def kinds(tp, cp):
    """Return the blocks of `sketch` in a cut; a layer takes ten times as long as the first."""
    hand = Affine(0, 40)
    sent = tuple(Sent("tp", "all_reduce", phase, 2, Affine(0, 10))
                 for phase in ("forward", "backward")) * (tp > 1)  # fmt: skip

    def parameters(**sizes):
        return tuple(Parameter(name, size, 4, -(-size // tp)) for name, size in sizes.items())

    def work(flops):
        return (Work("matmul", 2, Affine(0, flops / (tp * cp)), Affine()),)

    return (
        Behaviour(parameters(e=300), kept=Affine(0, 50), handed=hand, work=work(1e5)),
        Behaviour(
            parameters(w=101, b=10), kept=Affine(8, 1000), shared=Affine(5), entered=hand,
            backward_peak=Affine(0, 30), handed=hand, sent=sent, work=work(1e6),
        ),
        Behaviour(
            parameters(n=10, h=300), kept=Affine(0, 200), forward_peak=Affine(0, 100),
            work=work(4e6),
        ),
    )  # fmt: skip


def cluster(ranks, memory=2**20, **figures):
    """Return devices of a GFLOP and a GB a second, with one link between all."""
    device = Device("toy", memory, {"float32": 1e9}, 1e9, **figures)
    return Cluster(ranks, device, (Link(ranks, 1e-5, 1e8),))

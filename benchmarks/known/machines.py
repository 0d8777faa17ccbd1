"""Machines of published runs: figures of data sheets, and three fitted constants each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scaletorch.plan import Optimizer
from scaletorch.plan.clusters import DEVICES, Cluster, Link

GIB = 2**30
MOVING = 0.8  # share of memory bandwidth that operations other than matmuls reach; assumed


@dataclass(frozen=True, slots=True)
class Constants:
    """Figures that no data sheet gives, fitted on some runs.

    Attributes:
        products: Share of the peak that matrix products and attention reach.
        overhead: Further seconds of each operation.
        reserved: Further bytes of the device in use: context, libraries, fragments, buffers.
    """

    products: float
    overhead: float = 0.0
    reserved: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of some runs.

    Attributes:
        device: Key of `DEVICES`.
        inside: Bytes a second between ranks of a node of 8.
        between: Bytes a second of a rank to other nodes.
        constants: Fitted constants.
        source: Source of the figures.
        hides: Share of communication that overlaps with computation if the planner lets it.
    """

    device: str
    inside: float
    between: float
    constants: Constants
    source: str
    hides: float = 1.0

    def cluster(self, ranks: int, constants: Constants | None = None) -> Cluster:
        """Return a cluster of `ranks` ranks, with other constants if they are given."""
        own = constants or self.constants
        shares = {name: ((1.0, own.products),) for name in ("matmul", "attention")}
        device = replace(
            DEVICES[self.device], efficiency={**shares, "other": ((1.0, MOVING),)},
            overhead=own.overhead, hides=self.hides,
        )  # fmt: skip
        links = [Link(8, 3e-6, self.inside)]
        if ranks > 8:
            links.append(Link(ranks, 8e-6, self.between))
        return Cluster(ranks, device, tuple(links))


_NVLINK = "NVLink as nccl-tests' all_reduce reaches it on 8 ranks"
MACHINES = {
    "selene": Machine(
        "A100-SXM-80GB", 230e9, 25e9, Constants(0.71, 27e-6),
        f"{_NVLINK}; 8 HDR InfiniBand adapters of 200 Gbit/s a node (arXiv 2104.04473)",
    ),
    "jean zay": Machine(
        "A100-SXM-80GB", 230e9, 6.25e9, Constants(0.74, 290e-6, 94 * GIB // 10),
        f"{_NVLINK}; 4 Omni-Path links of 100 Gbit/s a node (BigScience, tr11-176B-ml)",
    ),
    "llama": Machine(
        "H100-SXM", 450e9, 50e9, Constants(0.6, 3e-6),
        f"{_NVLINK}; 400 Gbit/s of RoCE a rank (arXiv 2407.21783, section 3.3.1)",
    ),
}  # fmt: skip
MACHINES["selene 2022"] = replace(MACHINES["selene"], constants=Constants(0.78, 27e-6))
MACHINES["selene, nothing hides"] = replace(MACHINES["selene"], hides=0.0)

STATES = {
    # 2 bytes of a parameter, 2 of its gradient; 14 of accumulated gradient, master weight, moments.
    "megatron": Optimizer(moments=7, item=2, per_tensor=0),
    "llama": Optimizer(item=4),
    # Sharded over dp: float32 gradient, master weight, moments; replicated: fp16 weight, gradient.
    "deepspeed fp16": Optimizer(item=4, per_tensor=0),
    # A single rank keeps both gradients: 20 bytes.
    "deepspeed fp16 alone": Optimizer(moments=5, item=2, per_tensor=0),
    # Gradients in both precisions are replicated.
    "deepspeed bf16": Optimizer(item=4, per_tensor=0, sum_item=6),
    "deepspeed bf16 alone": Optimizer(moments=7, item=2, per_tensor=0),
}

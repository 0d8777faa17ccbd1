"""Clusters as data: devices, links by level, and their measured or published figures.

The table's peaks are for dense matrix products. Data sheets do not say which share of the peak a
program reaches: `ASSUMED` is a guess for all devices, and `spread` is its uncertainty. The
attention shares in `HOPPER` were measured: cuDNN's causal attention with 8,192 positions, 32 query
and 8 key/value heads of size 128 in bfloat16 took 1.01 ms forward and 2.97 ms backward on an H200.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches

from ..dist.errors import InvalidArgumentError
from .description import Kernels

Shares = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Link:
    """One level of the network.

    Attributes:
        ranks: Number of ranks that it joins: those of a node, of a rack, or all.
        latency: Seconds of a message, alpha.
        bandwidth: Bytes a second that a rank sends while it receives as many, 1 / beta.
        calls: Measured latency of a step and bandwidth by operation, such as "all_reduce";
            operations that are not listed use the two figures above.
    """

    ranks: int
    latency: float
    bandwidth: float
    calls: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for latency, bandwidth in ((self.latency, self.bandwidth), *self.calls.values()):
            if latency < 0 or bandwidth <= 0:
                raise InvalidArgumentError(
                    f"a link has a latency from 0 and a bandwidth above 0, got {latency} seconds "
                    f"and {bandwidth} bytes a second"
                )

    def of(self, operation: str) -> tuple[float, float]:
        """Return the latency and bandwidth of an operation."""
        return self.calls.get(operation) or (self.latency, self.bandwidth)


@dataclass(frozen=True, slots=True)
class Device:
    """The device of one rank.

    Attributes:
        name: Name, such as "A100-SXM-80GB".
        memory: Bytes that a program may use.
        flops: Peak flops a second of matrix products, by dtype.
        moving: Memory bandwidth in bytes a second.
        overhead: Fixed seconds of each operation, such as a kernel launch.
        efficiency: Share of the peak that each kind of operation reaches, by size, as ascending
            pairs (size, share); shares between two sizes are interpolated. "matmul", "attention"
            and "attention backward" are shares of `flops` by the flops of one operation; "other" is
            a share of `moving` by the bytes that one operation moves.
        updating: Bytes a second of an optimizer update; 0 means `moving`.
        hides: Share of communication that can overlap with computation; less than 1 if the same
            cores do both.
        spread: Relative uncertainty of computing times, in either direction.
        source: Source of the figures: a data sheet or a measurement.
        group_memory: Bytes of `memory` that each communicator holds, as in the table of
            `scaletorch.dist.devices`.
        kernels: Device type of its kernels; model descriptions are made for one type.
    """

    name: str
    memory: int
    flops: dict[str, float]
    moving: float
    overhead: float = 0.0
    efficiency: dict[str, Shares] = field(default_factory=dict)
    updating: float = 0.0
    hides: float = 1.0
    spread: float = 0.1
    source: str = ""
    group_memory: int = 0
    kernels: Kernels = "cuda"

    def __post_init__(self) -> None:
        if min(self.memory, self.moving, *self.flops.values()) <= 0:
            raise InvalidArgumentError(f"{self.name} has no memory, bandwidth or flops")
        for sort, pairs in self.efficiency.items():
            sizes = [size for size, _ in pairs]
            if sizes != sorted({*sizes}) or any(share <= 0 for _, share in pairs):
                raise InvalidArgumentError(
                    f"efficiency of {sort} must have ascending sizes and shares above 0"
                )

    def peak(self, dtype: str) -> float:
        """Return the peak flops a second of matrix products in a dtype.

        Raises:
            InvalidArgumentError: The device has no figure for the dtype.
        """
        if dtype not in self.flops:
            raise InvalidArgumentError(
                f"{self.name} has no flops of {dtype}: known are {', '.join(self.flops)}"
            )
        return self.flops[dtype]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices of one type and the links between them.

    Attributes:
        ranks: Number of ranks.
        device: The device of each rank, at its speed while all ranks compute.
        links: Links by level, innermost first; the last joins all ranks.

    Raises:
        InvalidArgumentError: The links are not in ascending order, or do not join all ranks.
    """

    ranks: int
    device: Device
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise InvalidArgumentError(f"a cluster has at least 1 rank, got {self.ranks}")
        sizes = [link.ranks for link in self.links]
        if sizes != sorted(set(sizes)) or (sizes and sizes[0] < 2):
            raise InvalidArgumentError(
                f"links go from the innermost level outwards, each joins more ranks, got {sizes}"
            )
        if self.ranks > 1 and (not sizes or sizes[-1] < self.ranks):
            joined = f"the outermost joins {sizes[-1]}" if sizes else "there are none"
            raise InvalidArgumentError(
                f"links miss a level: {self.ranks} ranks, and {joined}; add a link with "
                f'"ranks": {self.ranks}, its latency and bandwidth'
            )


GIB = 2**30
ASSUMED: dict[str, Shares] = {
    "matmul": ((1e7, 0.02), (1e9, 0.25), (1e11, 0.65)),
    "attention": ((1e8, 0.1), (1e10, 0.4)),
    "attention backward": ((1e8, 0.08), (1e10, 0.35)),
    "other": ((1e6, 0.3), (1e8, 0.8)),
}
HOPPER: dict[str, Shares] = {
    **ASSUMED,
    "attention": (*ASSUMED["attention"], (5.5e11, 0.55)),
    "attention backward": (*ASSUMED["attention backward"], (1.37e12, 0.47)),
}
_OVERHEAD = 3e-6  # seconds between two kernels; also assumed
_SPREAD = 0.3
_NCCL_GROUP = 512 * 2**20  # bytes of each communicator, as in the table of devices


def _device(name: str, gib: int, half: float, single: float, moving: float, source: str) -> Device:
    flops = {"float16": half, "bfloat16": half, "float32": single}
    if "V100" in name:
        del flops["bfloat16"]
    shares = HOPPER if name.startswith("H") else ASSUMED
    return Device(
        name, gib * GIB, flops, moving, _OVERHEAD, shares, spread=_SPREAD,
        source=f"{source}; shares of the peaks are assumed", group_memory=_NCCL_GROUP,
    )  # fmt: skip


# The float32 peaks are without TF32, which is torch's default.
DEVICES: dict[str, Device] = {
    each.name: each
    for each in (
        _device("V100-SXM2-32GB", 32, 125e12, 15.7e12, 900e9, "NVIDIA V100 data sheet, 2020"),
        _device("A100-SXM-40GB", 40, 312e12, 19.5e12, 1555e9, "NVIDIA A100 data sheet, 2021"),
        _device("A100-SXM-80GB", 80, 312e12, 19.5e12, 2039e9, "NVIDIA A100 data sheet, 2021"),
        _device("H100-SXM", 80, 989e12, 67e12, 3350e9, "NVIDIA H100 data sheet, 2023"),
        _device("H200", 140, 989e12, 67e12, 4800e9, "NVIDIA H200 data sheet, 2024"),
        _device("MI300X", 192, 1307e12, 163.4e12, 5300e9, "AMD Instinct MI300X data sheet, 2023"),
    )
}

# Device, ranks of a node, and a rank's one-way bytes a second: inside the node, by its adapter.
_NODES: dict[str, tuple[str, int, float, float]] = {
    "dgx-a100": ("A100-SXM-80GB", 8, 300e9, 25e9),  # NVLink 3, 8 adapters of 200 Gbit/s
    "dgx-h100": ("H100-SXM", 8, 450e9, 50e9),  # NVLink 4, 8 adapters of 400 Gbit/s
    "dgx-h200": ("H200", 8, 450e9, 50e9),
}
CLUSTERS = tuple(_NODES)
_INSIDE, _BETWEEN = 3e-6, 8e-6  # latency in seconds inside and between nodes; assumed


def device_named(name: str) -> Device:
    """Return a device of the table.

    Raises:
        InvalidArgumentError: The name is not in the table.
    """
    if name not in DEVICES:
        raise InvalidArgumentError(_unknown("device", name, DEVICES))
    return DEVICES[name]


def cluster_named(name: str, ranks: int) -> Cluster:
    """Return a cluster of one of the node types in `CLUSTERS`, with enough nodes for the ranks.

    Raises:
        InvalidArgumentError: The name is not in `CLUSTERS`.
    """
    if name not in _NODES:
        raise InvalidArgumentError(_unknown("cluster", name, _NODES))
    device, size, inside, between = _NODES[name]
    links = [Link(size, _INSIDE, inside)]
    if ranks > size:
        links.append(Link(ranks, _BETWEEN, between))
    return Cluster(ranks, DEVICES[device], tuple(links))


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = [each for each in names if name and each.lower().startswith(name.lower())]
    close = close or get_close_matches(name, names, 1, 0.4)
    meant = f"; did you mean {close[0]}?" if close else ""
    return f"{what} {name!r} is not in the table: {', '.join(names)}{meant}"

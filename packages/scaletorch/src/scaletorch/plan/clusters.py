"""Clusters as data: devices, links by level, and their figures from data sheets or files.

The table's peaks are for dense matrix products. Data sheets do not give the share of the peak a
program reaches: `ASSUMED` is a guess for all devices, and `spread` is its uncertainty. The
attention shares in `HOPPER` were measured: cuDNN's causal attention with 8,192 positions, 32 query
and 8 key/value heads of size 128 in bfloat16 took 1.01 ms forward and 2.97 ms backward on an H200.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

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
            if not _are_numbers(latency, bandwidth) or latency < 0 or bandwidth <= 0:
                raise InvalidArgumentError(
                    f"a link needs a latency of at least 0 and a bandwidth above 0, got {latency} "
                    f"seconds and {bandwidth} bytes a second"
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
        needed = self.memory, self.moving, *self.flops.values()
        others = self.overhead, self.updating, self.hides, self.spread, self.group_memory
        if not _are_numbers(*needed, *others) or min(needed) <= 0:
            raise InvalidArgumentError(
                f"device {self.name} needs memory, moving and flops above 0, and numbers alone"
            )

    def peak(self, dtype: str) -> float:
        """Return the peak flops a second of matrix products in a dtype.

        Raises:
            InvalidArgumentError: The device has no figure for the dtype.
        """
        if dtype not in self.flops:
            raise InvalidArgumentError(
                f"device {self.name} has no flops of {dtype}, only of {', '.join(self.flops)}"
            )
        return self.flops[dtype]


def _are_numbers(*values: object) -> bool:
    return all(isinstance(value, int | float) for value in values)


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
            raise InvalidArgumentError(f"a cluster needs at least 1 rank, got {self.ranks}")
        sizes = [link.ranks for link in self.links]
        if sizes != sorted(set(sizes)) or (sizes and sizes[0] < 2):
            raise InvalidArgumentError(
                f"each link must join more ranks than the one before it, got {sizes}"
            )
        if self.ranks > 1 and (not sizes or sizes[-1] < self.ranks):
            raise InvalidArgumentError(
                f"the links join {max(sizes, default=1)} of {self.ranks} ranks: add one with "
                f'"ranks": {self.ranks}, its latency and bandwidth'
            )


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
# Memory in GiB; peaks of 16 bits and of float32 (without TF32, which is torch's default); bytes a
# second of the memory, of a rank's links one way inside a node of 8, and of its adapter.
_TABLE = {
    # NVLink 2, 4 adapters of 100 Gbit/s
    "V100-SXM2-32GB": (32, 125e12, 15.7e12, 900e9, 150e9, 6.25e9, "NVIDIA V100 data sheet, 2020"),
    # NVLink 3, 8 adapters of 200 Gbit/s
    "A100-SXM-40GB": (40, 312e12, 19.5e12, 1555e9, 300e9, 25e9, "NVIDIA A100 data sheet, 2021"),
    "A100-SXM-80GB": (80, 312e12, 19.5e12, 2039e9, 300e9, 25e9, "NVIDIA A100 data sheet, 2021"),
    # NVLink 4, 8 adapters of 400 Gbit/s
    "H100-SXM": (80, 989e12, 67e12, 3350e9, 450e9, 50e9, "NVIDIA H100 data sheet, 2023"),
    "H200": (140, 989e12, 67e12, 4800e9, 450e9, 50e9, "NVIDIA H200 data sheet, 2024"),
    # 7 links of Infinity Fabric, 8 adapters of 400 Gbit/s
    "MI300X": (192, 1307e12, 163.4e12, 5300e9, 448e9, 50e9, "AMD MI300X data sheet, 2023"),
}
_SIZE = 8  # ranks of a node
_OVERHEAD = 3e-6  # seconds between two kernels; assumed, as are the next two
_INSIDE, _BETWEEN = 3e-6, 8e-6  # latency in seconds inside and between nodes
_SPREAD = 0.3
_NCCL_GROUP = 512 * 2**20  # bytes of each communicator, as in the table of devices


def _of_table(name: str) -> Device:
    gib, half, single, moving, _, _, source = _TABLE[name]
    flops = {"float16": half, "bfloat16": half, "float32": single}
    if "V100" in name:
        del flops["bfloat16"]
    return Device(
        name, gib * 2**30, flops, moving, _OVERHEAD, HOPPER if name[0] == "H" else ASSUMED,
        spread=_SPREAD, source=f"{source}; shares of the peaks are assumed",
        group_memory=_NCCL_GROUP,
    )  # fmt: skip


DEVICES = {name: _of_table(name) for name in _TABLE}


def cluster_named(name: str, ranks: int) -> Cluster:
    """Return a cluster of devices of the table `DEVICES`, in nodes of 8 as they are usually sold.

    Raises:
        InvalidArgumentError: The name is not in the table.
    """
    if name not in DEVICES:
        raise InvalidArgumentError(f"device {name!r} is not one of {', '.join(DEVICES)}")
    *_, inside, between, _ = _TABLE[name]
    links = [Link(_SIZE, _INSIDE, inside)] if ranks > 1 else []
    if ranks > _SIZE:
        links.append(Link(ranks, _BETWEEN, between))
    return Cluster(ranks, DEVICES[name], tuple(links))


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster as JSON, in bytes and seconds."""
    path.write_text(json.dumps(asdict(cluster), indent=1) + "\n")


def read_cluster(path: Path, ranks: int | None = None) -> Cluster:
    """Read a cluster: `{"ranks": 16, "device": "H100-SXM", "links": [{"ranks": 8, ...}, ...]}`.

    Args:
        path: A file in the format of `write_cluster`, in bytes and seconds. The device may be a
            name of the table.
        ranks: Number of ranks of the job; None for all ranks in the file.

    Raises:
        InvalidArgumentError: The file does not exist, a field is missing, unknown or of the wrong
            type, or the links do not join all ranks.
    """
    content = _json_of(path)
    try:
        device, size = content["device"], int(content["ranks"])
        links = tuple(_link(**each) for each in content["links"])
        made = cluster_named(device, 1).device if isinstance(device, str) else _device(**device)
        found = Cluster(size, made, links)
    except KeyError as error:
        needed = '"ranks", "device" and "links"'
        raise InvalidArgumentError(f"{path} lacks {error}: a cluster needs {needed}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidArgumentError(f"{path} is not a cluster: {error}") from None
    if ranks is not None and ranks > found.ranks:
        raise InvalidArgumentError(f"{path} has {found.ranks} ranks, but the job needs {ranks}")
    return found if ranks is None else replace(found, ranks=ranks)


def _device(efficiency: Mapping[str, Any] | None = None, **fields: Any) -> Device:
    shares = {sort: tuple(map(tuple, pairs)) for sort, pairs in (efficiency or {}).items()}
    return Device(**fields, efficiency=shares)


def _link(calls: Mapping[str, Any] | None = None, **fields: Any) -> Link:
    return Link(**fields, calls={name: tuple(pair) for name, pair in (calls or {}).items()})


def _json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidArgumentError(f"{path} is not JSON: {error}") from None

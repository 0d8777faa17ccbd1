"""What a job would run on, as data: devices, links by level, figures as measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...dist.errors import InvalidArgumentError
from ..description import Kernels

Shares = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Link:
    """A level of the network.

    Attributes:
        ranks: How many ranks it joins: those of a node, of a rack, all.
        latency: Seconds of a message, alpha.
        bandwidth: Bytes a second that a rank sends and at the same time receives, 1 / beta.
        calls: Latency of a step and bandwidth of single operations, if they were measured, such as
            "all_reduce"; the two above hold for all others.
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
        """Return latency and bandwidth of an operation."""
        return self.calls.get(operation) or (self.latency, self.bandwidth)


@dataclass(frozen=True, slots=True)
class Device:
    """What a rank computes on.

    Attributes:
        name: Such as "A100-SXM-80GB".
        memory: Bytes that a program may use.
        flops: Operations a second of matrix products, by dtype.
        moving: Bytes a second of its memory.
        overhead: Seconds that an operation takes beside its computing.
        efficiency: Share that a sort of operation reaches, by its size, as pairs (size, share),
            ascending; between two it is interpolated. "matmul", "attention" and "attention
            backward" have a share of `flops` by the flops of one operation, "other" one of
            `moving` by the bytes that one operation moves.
        updating: Bytes a second of an update of parameters; 0 for `moving`.
        hides: Share of communication that may run beside computation; less than 1 if the same
            cores do both.
        spread: By which share times of computation may be off either way.
        source: Where the figures are from: a data sheet, or what was measured.
        group_memory: Bytes that each communicator holds of `memory`, as the table of
            `scaletorch.dist.devices` has it.
        kernels: Of which sort it runs: models are described with them.
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
        """Return operations a second of matrix products of a dtype.

        Raises:
            InvalidArgumentError: None are known.
        """
        if dtype not in self.flops:
            raise InvalidArgumentError(
                f"{self.name} has no flops of {dtype}: known are {', '.join(self.flops)}"
            )
        return self.flops[dtype]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices of one sort, and what joins them.

    Attributes:
        ranks: How many.
        device: Of each rank, as quick as it is while all ranks compute.
        links: By level, the innermost first; the last joins all ranks.

    Raises:
        InvalidArgumentError: Links that do not join all ranks, or not in ascending order.
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

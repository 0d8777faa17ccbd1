"""What a job would run on, as data: devices, links by level, figures as measured."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Link:
    """A level of the network.

    Attributes:
        ranks: How many ranks it joins: those of a node, of a rack, all.
        latency: Seconds of a message, alpha.
        bandwidth: Bytes a second that a rank sends and at the same time receives, 1 / beta.
    """

    ranks: int
    latency: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Device:
    """What a rank computes on.

    Attributes:
        name: Such as "A100-SXM-80GB".
        memory: Bytes that a program may use.
        flops: Operations a second of matrix products, by dtype.
        moving: Bytes a second of its memory.
        overhead: Seconds that an operation takes at least.
        efficiency: Share of `flops` that a sort of operation reaches, by its size: for "matmul" and
            "attention" pairs (flops of one operation, share), ascending.
        source: Where the figures are from: a data sheet, or what was measured.
    """

    name: str
    memory: int
    flops: dict[str, float]
    moving: float
    overhead: float = 0.0
    efficiency: dict[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices of one sort, and what joins them.

    Attributes:
        ranks: How many.
        device: Of each rank.
        links: By level, the innermost first; the last joins all ranks.
    """

    ranks: int
    device: Device
    links: tuple[Link, ...]

    def link(self, ranks: int) -> Link:
        """Return the slowest link inside a group that spans so many consecutive ranks."""
        return next((link for link in self.links if ranks <= link.ranks), self.links[-1])

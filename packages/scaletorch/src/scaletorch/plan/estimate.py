"""The cost of a layout: memory of its pipeline ranks, seconds of its step."""

from __future__ import annotations

from dataclasses import dataclass

from .layout import Layout


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the fullest rank at one place of the pipeline.

    Attributes:
        parameters: The rank's parameter shards.
        gradients: Buffers in which gradients are accumulated.
        optimizer: The optimizer's state, and its master weights if it has any.
        activations: Bytes kept for backward at the peak, including those between the two halves of
            a split backward.
        working: Temporary bytes above that while a block runs, the larger of forward and backward.
        buffers: Communication buffers: gradient buckets and messages.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    working: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """The sum of all fields."""
        return (
            self.parameters + self.gradients + self.optimizer + self.activations + self.working
            + self.buffers
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of a step, on the slowest rank of the pipeline.

    Attributes:
        step: Total.
        computing: Forward, backward and recomputation.
        exposed: Communication that computation waits for, by axis.
        hidden: Communication that overlaps with computation, by axis.
        bubble: Share of the step in which pipeline ranks wait for one another.
        update: Optimizer update.
        low: Optimistic estimate of the step.
        high: Pessimistic estimate of the step.
    """

    step: float
    computing: float
    exposed: dict[str, float]
    hidden: dict[str, float]
    bubble: float
    update: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A layout and its costs.

    Attributes:
        layout: The layout.
        memory: Memory of each rank of the pipeline.
        time: Time of a step.
        communicators: Bytes of communicators on each rank, not included in `memory`.
    """

    layout: Layout
    memory: tuple[Memory, ...]
    time: Time
    communicators: int = 0

    @property
    def fullest(self) -> int:
        """The pipeline rank that holds the most."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total)

    @property
    def peak(self) -> int:
        """Bytes on the fullest rank, including its communicators."""
        return self.memory[self.fullest].total + self.communicators

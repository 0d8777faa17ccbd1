"""The cost of a layout: memory of its pipeline ranks, seconds of its step."""

from __future__ import annotations

from dataclasses import dataclass

from .layout import Layout


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the fullest rank at one place of the pipeline."""

    parameters: int  # the rank's parameter shards
    gradients: int  # buffers in which gradients are accumulated
    optimizer: int  # the optimizer's state, and its master weights if it has any
    activations: int  # kept for backward at the peak, also between the halves of a split backward
    working: int = 0  # temporary above that while a block runs, the larger of both passes
    buffers: int = 0  # communication buffers: gradient buckets and messages

    @property
    def total(self) -> int:
        """The sum of all fields."""
        return (
            self.parameters + self.gradients + self.optimizer + self.activations + self.working
            + self.buffers
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of a step, on the slowest rank of the pipeline."""

    step: float  # all of it
    computing: float  # forward, backward and recomputation
    exposed: dict[str, float]  # communication that computation waits for, by axis
    hidden: dict[str, float]  # communication that overlaps with computation, by axis
    bubble: float  # share of the step in which pipeline ranks wait for one another
    update: float  # of the optimizer
    low: float  # optimistic estimate of `step`
    high: float  # pessimistic estimate of `step`


@dataclass(frozen=True, slots=True)
class Estimate:
    """A layout and its costs."""

    layout: Layout
    memory: tuple[Memory, ...]  # memory of each rank of the pipeline
    time: Time  # of a step
    communicators: int = 0  # bytes of communicators on each rank, not included in `memory`

    @property
    def fullest(self) -> int:
        """The pipeline rank that holds the most."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total)

    @property
    def peak(self) -> int:
        """Bytes on the fullest rank, including its communicators."""
        return self.memory[self.fullest].total + self.communicators

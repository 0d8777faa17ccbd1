"""The cost of a layout: memory of its stages, seconds of its step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..dist.errors import InvalidArgumentError
from .layout import Layout

if TYPE_CHECKING:
    from torch import nn

    from ..parallel.data_parallel import DataParallelBucket
    from ..parallel.pg_manager import ProcessGroupManager


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the fullest rank of one place in the pipeline.

    Attributes:
        parameters: The rank's shards.
        gradients: Buffers in which gradients are summed.
        optimizer: The optimizer's state, and master weights if it keeps any.
        activations: Kept for backward at the peak, also between the halves of a backward.
        working: Above that while a block runs, forward or backward, whichever is more.
        buffers: Of communication: gradient buckets, messages.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    working: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return (
            self.parameters + self.gradients + self.optimizer + self.activations + self.working
            + self.buffers
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of a step, of its slowest rank of the pipeline.

    Attributes:
        step: In all.
        computing: Forward, backward and recomputation.
        exposed: Communication that computation waits for, by axis.
        hidden: Communication that overlaps with computation, by axis.
        bubble: Share of the step in which the pipeline's ranks wait for one another.
        update: The optimizer's.
        low: The step, if what is uncertain is good.
        high: The step, if it is bad.
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
        memory: Of each rank of the pipeline.
        time: Of a step.
        communicators: Bytes of every rank's communicators, beside `memory`.
    """

    layout: Layout
    memory: tuple[Memory, ...]
    time: Time
    communicators: int = 0

    @property
    def fullest(self) -> int:
        """The rank of the pipeline that holds the most."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total)

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank, its communicators included."""
        return self.memory[self.fullest].total + self.communicators

    def parallelize(
        self, model: nn.Module, manager: ProcessGroupManager, **options: Any
    ) -> DataParallelBucket:
        """Put a plain model on the grid as this layout says; see `compose.parallelize`.

        Args:
            model: As for `compose.parallelize`.
            manager: Of the layout's grid.
            options: Further arguments of `compose.parallelize`.

        Raises:
            InvalidArgumentError: The manager has another grid; and as `compose.parallelize`.
        """
        from ..compose import parallelize  # all else here does without torch

        if manager.grid != self.layout.grid:
            raise InvalidArgumentError(
                f"the plan is for {self.layout.grid}, and the manager has {manager.grid}"
            )
        return parallelize(model, manager, **{**self.layout.arguments(), **options})

    def as_json(self) -> dict[str, Any]:
        """Return plain containers and numbers."""
        return asdict(self)

"""A layout and what it costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from ..parallel.data_parallel import DataParallelBucket
from ..parallel.pg_manager import ProcessGroupManager
from .applying import put_on
from .costs import Memory, Time, Traffic
from .holding import Holdings
from .layout import Layout
from .memory import memory
from .traffic import traffic


@dataclass(frozen=True)
class Estimate:
    """A layout and its costs.

    Of thousands of layouts few are looked at: what the ranks of one hold and send is worked out
    when it is first asked for.

    Attributes:
        layout: The layout.
        holdings: Of the model and the optimizer.
        time: Of a step; None if no cluster's speed is known.
    """

    layout: Layout
    holdings: Holdings = field(repr=False, compare=False)
    time: Time | None = None

    @cached_property
    def memory(self) -> tuple[Memory, ...]:
        """Of each rank of the pipeline."""
        return memory(self.holdings.description, self.layout, holdings=self.holdings)

    @cached_property
    def traffic(self) -> tuple[tuple[Traffic, ...], ...]:
        """Of each rank of the pipeline."""
        return traffic(self.holdings.description, self.layout, holdings=self.holdings)

    @property
    def fullest(self) -> int:
        """Which rank of the pipeline holds the most."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total)

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank."""
        return self.memory[self.fullest].total

    def parallelize(
        self, model: nn.Module, manager: ProcessGroupManager, **options: Any
    ) -> DataParallelBucket:
        """Put a plain model on the grid as this layout says; see `compose.parallelize`.

        Raises:
            InvalidArgumentError: The manager has another grid; and as `compose.parallelize`.
        """
        return put_on(self.layout, model, manager, **options)

    def as_json(self) -> dict[str, Any]:
        """Return plain containers and numbers."""
        return {
            "layout": asdict(self.layout),
            "memory": tuple(asdict(each) for each in self.memory),
            "traffic": tuple(tuple(asdict(each) for each in own) for own in self.traffic),
            "time": asdict(self.time) if self.time else None,
        }

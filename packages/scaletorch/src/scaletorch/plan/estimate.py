"""What a layout costs: memory of its stages, bytes on its axes, seconds of its step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar, overload

from .layout import Layout

if TYPE_CHECKING:
    from torch import nn

    from ..parallel.data_parallel import DataParallelBucket
    from ..parallel.pg_manager import ProcessGroupManager

T = TypeVar("T")


class Later(Sequence[T]):
    """A tuple of which no more is made than somebody looks at; pickled as a plain one.

    Args:
        make: Returns the items.
        length: How many there are.
    """

    def __init__(self, make: Callable[[], Iterable[T]], length: int) -> None:
        self._make, self._length = make, length
        self._items: Iterator[T] | None = None
        self._made: list[T] = []

    def _until(self, stop: int | None) -> list[T]:
        if self._items is None:
            self._items = iter(self._make())
        self._made += islice(self._items, None if stop is None else max(0, stop - len(self._made)))
        return self._made

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[T, ...]: ...
    def __getitem__(self, at: int | slice) -> T | tuple[T, ...]:
        """Return one or some of it."""
        if isinstance(at, slice):
            behind = at.stop is None or min(at.start or 0, at.stop, at.step or 1) < 0
            return tuple(self._until(None if behind else at.stop)[at])
        return self._until(None if at < 0 else at + 1)[at]

    def __len__(self) -> int:
        """Return how many there are."""
        return self._length

    def __eq__(self, other: object) -> bool:
        """Return whether the other one has the same in the same order."""
        return tuple(self) == (tuple(other) if isinstance(other, Later) else other)

    def __hash__(self) -> int:
        """Return the hash of the tuple."""
        return hash(tuple(self))

    def __repr__(self) -> str:
        """Return the tuple's text."""
        return repr(tuple(self))

    def __reduce__(self) -> tuple[type[tuple[T, ...]], tuple[tuple[T, ...]]]:
        """Pickle the tuple."""
        return tuple, (tuple(self),)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the fullest rank of a stage's rank of the pipeline.

    Attributes:
        parameters: Its shards.
        gradients: Where they are summed.
        optimizer: The optimizer's state, and master weights if it keeps any.
        activations: Kept for backward when the rank holds the most, or by the first half of one for
            the second.
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
class Traffic:
    """What a rank sends in a step over one axis by one collective.

    Attributes:
        axis: "tp", "cp", "ep", "pp", "cp_dp" or "edp".
        operation: As in `Sent`.
        count: Calls.
        bytes: Over the wire, as rings send it.
    """

    axis: str
    operation: str
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of a step, of its slowest rank of the pipeline.

    Attributes:
        step: In all.
        computing: Forward, backward and what runs again.
        exposed: Communication that computation waits for, by axis.
        hidden: Communication that it does not wait for, by axis.
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
        memory: Of each rank of the pipeline; of a search made when it is first looked at, since of
            thousands of layouts few are.
        traffic: Of each rank of the pipeline; likewise.
        time: Of a step; None if no cluster's speed is known.
        communicators: Bytes of every rank's communicators, beside `memory`.
    """

    layout: Layout
    memory: Sequence[Memory]
    traffic: Sequence[tuple[Traffic, ...]]
    time: Time | None = None
    communicators: int = 0

    @property
    def fullest(self) -> int:
        """Which rank of the pipeline holds the most."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total)

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank, its communicators included."""
        return self.memory[self.fullest].total + self.communicators

    def parallelize(
        self, model: nn.Module, manager: ProcessGroupManager, **options: Any
    ) -> DataParallelBucket:
        """Put a plain model on the grid as this layout says; see `compose.parallelize`.

        Raises:
            InvalidArgumentError: The manager has another grid; and as `compose.parallelize`.
        """
        from .applying import put_on  # all else here does without torch

        return put_on(self.layout, model, manager, **options)

    def as_json(self) -> dict[str, Any]:
        """Return plain containers and numbers."""
        whole = replace(self, memory=tuple(self.memory), traffic=tuple(self.traffic))
        return asdict(whole)

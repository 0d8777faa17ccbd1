"""A schedule as a value: the ordered actions of every rank, and who has which stages.

It says only what is computed and in which order; what is sent and received follows from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ....dist.errors import InvalidArgumentError

FORWARD = "F"
BACKWARD = "B"  # of inputs and of weights
BACKWARD_INPUT = "I"
BACKWARD_WEIGHT = "W"
KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
MOST_FORWARDS = 5_000_000  # of all ranks together; about a gigabyte of actions


class Action(NamedTuple):
    """What a rank computes at a time.

    Attributes:
        kind: "F" forward, "B" backward, or its two parts, "I" for the gradient of the inputs and
            "W" for those of the weights.
        micro_batch: Of which micro-batch, from 0.
        chunk: Of which of the rank's stages, from 0.
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        """Write it as ``F3``, and of later chunks as ``F3.1``."""
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind}{self.micro_batch}{chunk}"


@dataclass(frozen=True)
class Schedule:
    """What every rank of a pipeline computes in a step, in its order.

    Attributes:
        name: What it is called.
        num_micro_batches: Micro-batches of the step.
        stages: Each rank's stages, chunk by chunk.
        ranks: Each rank's actions.
    """

    name: str
    num_micro_batches: int
    stages: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Number of stages, of all ranks together."""
        return sum(map(len, self.stages))

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """The rank and the chunk of each stage."""
        return {
            stage: (rank, chunk)
            for rank, stages in enumerate(self.stages)
            for chunk, stage in enumerate(stages)
        }

    def __str__(self) -> str:
        """Write one line for each rank."""
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)


def one_stage_each(num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return stages of which rank r has the r-th."""
    return tuple((rank,) for rank in range(num_ranks))


def of_kind(kind: str, micro_batches: Iterable[int], chunk: int = 0) -> list[Action]:
    """Return one action for each micro-batch."""
    return [Action(kind, micro_batch, chunk) for micro_batch in micro_batches]


def require_sizes(num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> None:
    """Check the sizes that every schedule needs.

    Raises:
        InvalidArgumentError: No whole numbers, less than one of any, or more than `MOST_FORWARDS`.
    """
    sizes = {"ranks": num_ranks, "micro-batches": num_micro_batches, "stages a rank": num_chunks}
    for name, size in sizes.items():
        if not isinstance(size, int):
            raise InvalidArgumentError(f"a schedule needs a whole number of {name}, got {size!r}")
    if num_ranks < 1 or num_micro_batches < 1:
        raise InvalidArgumentError(
            "a schedule needs at least 1 rank and 1 micro-batch, got "
            f"{num_ranks} ranks and {num_micro_batches} micro-batches"
        )
    forwards = num_ranks * num_micro_batches * num_chunks
    if forwards > MOST_FORWARDS:
        raise InvalidArgumentError(
            f"a schedule of {num_ranks} ranks, {num_micro_batches} micro-batches and {num_chunks} "
            f"stages a rank has {forwards} forwards, and its actions are held one by one: at most "
            f"{MOST_FORWARDS}; take fewer micro-batches a step"
        )

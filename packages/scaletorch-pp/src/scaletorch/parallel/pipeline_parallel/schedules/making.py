"""What makers of schedules share: which stages ranks have, actions of a kind, legal sizes."""

from __future__ import annotations

from collections.abc import Iterable

from ....dist.errors import InvalidArgumentError
from .schedule import Action

MOST_FORWARDS = 5_000_000  # of all ranks together; about a gigabyte of actions


def one_stage_each(num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank if rank r has stage r alone."""
    return tuple((rank,) for rank in range(num_ranks))


def looped_stages(num_ranks: int, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank if rank r of N has r, r + N, r + 2N and so on.

    Raises:
        InvalidArgumentError: Fewer than one chunk.
    """
    if num_chunks < 1:
        raise InvalidArgumentError(f"every rank needs at least 1 chunk, got {num_chunks}")
    num_stages = num_ranks * num_chunks
    return tuple(tuple(range(rank, num_stages, num_ranks)) for rank in range(num_ranks))


def v_stages(num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank if rank r of N has r and 2N - 1 - r: down and up again."""
    return tuple((rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks))


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

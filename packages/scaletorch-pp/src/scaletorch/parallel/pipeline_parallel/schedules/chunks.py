"""Who has which stages where every rank has several."""

from __future__ import annotations

from ....dist.errors import InvalidArgumentError


def looped_stages(num_ranks: int, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return stages of which rank r of N has r, r + N, r + 2N and so on.

    Raises:
        InvalidArgumentError: Less than one chunk.
    """
    if num_chunks < 1:
        raise InvalidArgumentError(f"every rank needs at least 1 chunk, got {num_chunks}")
    num_stages = num_ranks * num_chunks
    return tuple(tuple(range(rank, num_stages, num_ranks)) for rank in range(num_ranks))


def v_stages(num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return stages of which rank r of N has r and 2N - 1 - r: down the ranks and up again."""
    return tuple((rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks))

"""How a length is divided over ranks, and which numbers of ranks would divide it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...dist.errors import InvalidArgumentError


def shard_sizes(length: int, size: int) -> tuple[int, ...]:
    """Return each rank's share of `length`: equal, or one more on the first ranks."""
    share, longer = divmod(length, size)
    return tuple(share + (rank < longer) for rank in range(size))


def nearest_divisors(length: int, size: int) -> tuple[int, ...]:
    """Return the divisors of `length` next to `size`: below, itself, above, where there are any."""
    divisors = [d for d in range(1, length + 1) if length % d == 0]
    below = [d for d in divisors if d < size][-1:]
    same = [d for d in divisors if d == size]
    above = [d for d in divisors if d > size][:1]
    return (*below, *same, *above)


def legal_sizes(length: int, size: int) -> str:
    """Say which tensor-parallel sizes near `size` divide `length`."""
    numbers = [str(d) for d in nearest_divisors(length, size)]
    return f"the nearest legal tp sizes are {' and '.join(numbers)}" if numbers else "none is legal"


def require_divisible(what: str, length: int, size: int) -> None:
    """Refuse a length that does not split into equal shards.

    Raises:
        InvalidArgumentError: `size` does not divide `length`.
    """
    if length % size:
        raise InvalidArgumentError(
            f"{what} = {length} does not divide over tp = {size} ranks; {legal_sizes(length, size)}"
        )


def take_shard(full: torch.Tensor, dim: int, sizes: Sequence[int], rank: int) -> torch.Tensor:
    """Return the view of `full` that is `rank`'s shard along `dim`."""
    return full.narrow(dim, sum(sizes[:rank]), sizes[rank])

"""Random draws of a run: the rows of each step, and the seeds of ranks."""

from __future__ import annotations

import random

import torch

from ..parallel.pg_manager import ProcessGroupManager, get_process_group_manager
from .batches import require_whole_number, rows_of_ranks
from .forward import require_manager

_ROUNDS = 6
_WORD = 2**64 - 1


def rows_of_step(
    step: int,
    *,
    rows: int,
    batch_size: int,
    seed: int = 0,
    manager: ProcessGroupManager | None = None,
) -> list[int]:
    """Return the indices of the rows that this data-parallel rank reads for a step.

    Every epoch has all rows once, in a random order of its own; a batch may end one epoch and begin
    the next. The order depends only on the arguments, so a run that resumes needs only the step,
    and may use another layout: together ranks read the rows that one process would read. There is
    no communication, and time and memory do not depend on `rows`.

    Args:
        step: The step from 0; after a checkpoint, the number of steps done.
        rows: The number of rows in the data set.
        batch_size: The number of rows in a global batch.
        seed: The seed of the order.
        manager: The grid; by default the current one, or one process.

    Returns:
        This rank's rows, in the order in which `shard_global_batch` would cut them from the whole
        batch: `batch_size // dp`, and one more on the first ranks if dp does not divide it. The
        ranks of one dp coordinate have the same rows.

    Raises:
        InvalidArgumentError: A number is no integer, or too small.

    Example:
        >>> steps = (rows_of_step(s, rows=len(data), batch_size=8) for s in range(done, total))
        >>> loader = DataLoader(data, batch_sampler=steps)
    """
    require_manager(manager)
    manager = get_process_group_manager() if manager is None else manager
    place, size = (0, 1) if manager is None else (manager.dp_rank, manager.dp_size)
    require_whole_number("step", step, 0)
    require_whole_number("rows", rows, 1)
    require_whole_number("batch_size", batch_size, 1)
    require_whole_number("seed", seed)
    (own,) = rows_of_ranks(batch_size, size, 1)[place]
    first = step * batch_size
    return [_row(first + index, rows, seed) for index in own]


def _row(position: int, rows: int, seed: int) -> int:
    """Return the row at a position in the sequence of all epochs."""
    epoch, place = divmod(position, rows)
    key = _mixed(_mixed(seed) ^ epoch)
    half = max(1, ((rows - 1).bit_length() + 1) // 2)
    while True:  # cycle walking: permute a power of 4 numbers until the result is below `rows`
        place = _permuted(place, half, key)
        if place < rows:
            return place


def _permuted(number: int, half: int, key: int) -> int:
    """Permute the numbers of `2 * half` bits by a Feistel network, a bijection for any hash."""
    mask = (1 << half) - 1
    left, right = number >> half, number & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (_mixed(key + turn * (mask + 1) + right) & mask)
    return left << half | right


def _mixed(number: int) -> int:
    """Hash a number to 64 bits, each of which depends on all bits of the number (SplitMix64)."""
    number = (number + 0x9E3779B97F4A7C15) & _WORD
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _WORD
    return number ^ number >> 31


def seed_ranks(seed: int, manager: ProcessGroupManager) -> None:
    """Seed torch's default generators for training on `manager`'s grid.

    Call it after building the model, whose weights must be the same on all ranks. Ranks of one tp
    group get the same seed, since dropout must drop the same elements of their activations. Ranks
    with other rows (dp), positions (cp) or layers (pp) draw independently.

    Args:
        seed: Any integer, the same on all ranks.
        manager: The grid.

    Raises:
        InvalidArgumentError: The seed is no integer.
    """
    require_whole_number("seed", seed)
    # Hashing makes nearby seeds unrelated; the CPU generator uses 32 bits.
    torch.manual_seed(random.Random(f"{seed} {_place(manager)}").getrandbits(32))


def _place(manager: ProcessGroupManager) -> tuple[int, ...]:
    """Return the coordinates of a rank along axes over which activations differ."""
    return manager.dp_rank, manager.pp_rank, manager.cp_rank

"""Random draws of a run: the rows of each step, and the seeds of a grid."""

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
    """Return which rows this data-parallel rank reads for a step, without communication.

    All rows come in a random order, once each in every epoch, in another order in each; a batch may
    end one epoch and begin the next. The order depends on nothing but the arguments, so a program
    that goes on from a checkpoint needs no position beside the step, and may have any other layout:
    ranks read what one process would have read. Any row of an order is found alone, so that none
    is written down, however many there are.

    Args:
        step: 0-based; a checkpoint's number of steps done is the next one.
        rows: Rows of the data set.
        batch_size: Rows of a global batch.
        seed: Of the order.
        manager: The grid; by default the current one, or one process.

    Returns:
        This rank's rows, in the order in which `shard_global_batch` would cut them from the whole
        batch: `batch_size / dp`, and on the first ranks one more if that is no whole number. The
        ranks of one dp coordinate have the same.

    Raises:
        InvalidArgumentError: A number that is none or too small.

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
    """Return the row at a position of all epochs, one behind another."""
    epoch, place = divmod(position, rows)
    key = _mixed(_mixed(seed) ^ epoch)
    half = max(1, ((rows - 1).bit_length() + 1) // 2)
    while True:  # a permutation of a power of 4, walked until it is back below `rows`
        place = _permuted(place, half, key)
        if place < rows:
            return place


def _permuted(number: int, half: int, key: int) -> int:
    """Permute the numbers of `2 * half` bits: a Feistel network, which any function makes one."""
    mask = (1 << half) - 1
    left, right = number >> half, number & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (_mixed(key + turn * (mask + 1) + right) & mask)
    return left << half | right


def _mixed(number: int) -> int:
    """Return 64 bits that all depend on all of the number's (SplitMix64)."""
    number = (number + 0x9E3779B97F4A7C15) & _WORD
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _WORD
    return number ^ number >> 31


def seed_ranks(seed: int, manager: ProcessGroupManager) -> None:
    """Seed torch's default generators for training on `manager`'s grid.

    Call it once the model is made (whose weights must be the same on all ranks), before training.
    Ranks of one tp group get one seed: they hold the same activations, and must drop the same
    elements. Ranks of other rows (dp), positions (cp) or layers (pp) draw independently. Draws on
    activations that are sharded over tp are left to the tensor-parallel plan.

    Args:
        seed: Any integer, the same on all ranks.
        manager: The grid.

    Raises:
        InvalidArgumentError: The seed is no integer.
    """
    require_whole_number("seed", seed)
    # Neighbouring seeds are no neighbours after this; the CPU generator uses 32 bits.
    torch.manual_seed(random.Random(f"{seed} {_place(manager)}").getrandbits(32))


def _place(manager: ProcessGroupManager) -> tuple[int, ...]:
    """Return the coordinates by which activations differ: of rows, layers and positions."""
    return manager.dp_rank, manager.pp_rank, manager.cp_rank

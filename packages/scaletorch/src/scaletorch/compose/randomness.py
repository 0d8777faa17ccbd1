"""Seeds of a grid: random draws agree over tp, and differ over every other axis."""

from __future__ import annotations

import random

import torch

from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager import ProcessGroupManager


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
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidArgumentError(f"seed must be an integer; it is {seed!r}")
    # Neighbouring seeds are no neighbours after this; the CPU generator uses 32 bits.
    torch.manual_seed(random.Random(f"{seed} {_place(manager)}").getrandbits(32))


def _place(manager: ProcessGroupManager) -> tuple[int, ...]:
    """Return the coordinates by which activations differ: of rows, layers and positions."""
    return manager.dp_rank, manager.pp_rank, manager.cp_rank

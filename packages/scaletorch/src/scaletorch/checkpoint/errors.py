"""What can be wrong with a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..dist.building import name_ranks
from ..dist.errors import ScaletorchError


class CheckpointError(ScaletorchError, RuntimeError):
    """A checkpoint cannot be saved, or does not fit the model; the same error on every rank."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not, or no longer, what was saved."""


class Failure(NamedTuple):
    """What a rank has failed with.

    Attributes:
        text: What to say of it.
        damaged: Whether it is damage of the checkpoint.
    """

    text: str
    damaged: bool


def joined_error(failures: Mapping[int, Failure], what: str) -> CheckpointError:
    """Return the one error for all ranks: damaged only where all that failed found damage."""
    said: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        said.setdefault(failure.text, []).append(rank)
    lines = [f"{name_ranks(ranks)}: {text}" for text, ranks in said.items()]
    damaged = all(failure.damaged for failure in failures.values())
    return (DamagedCheckpointError if damaged else CheckpointError)(f"{what}: " + "\n".join(lines))

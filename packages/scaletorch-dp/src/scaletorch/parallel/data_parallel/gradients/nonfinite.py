"""Which gradients are infinite or NaN, and on which ranks."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ....dist.errors import NonFiniteError
from ..culprits import Found, name_culprits, share_names
from ..sharding.shards import settled_shards


def nonfinite_names(model: nn.Module) -> list[str]:
    """Return this rank's parameters whose gradients, or shards of them, are not all finite."""
    held = [s for s in settled_shards(model) if s.tensor.grad is not None and s.stop > s.start]
    if not held:
        return []
    gradients = [shard.tensor.grad for shard in held]
    gradients = [g.coalesce().values() if g is not None and g.is_sparse else g for g in gradients]
    finite = torch.stack([g.isfinite().all().cpu() for g in gradients if g is not None]).tolist()
    return list(dict.fromkeys(s.name for s, fine in zip(held, finite, strict=True) if not fine))


def found_on_ranks(
    model: nn.Module,
    group: ProcessGroup | None,
    place: str | None = None,
    *,
    alone: bool = False,
) -> Found:
    """Return all ranks' non-finite gradients by rank; every rank of the group calls it.

    Args:
        model: A data-parallel wrapper, or any module.
        group: The ranks to ask.
        place: This rank's; by default its coordinates in the grid, or its number without one.
        alone: Ask this rank alone, as the others have the same.
    """
    return share_names(nonfinite_names(model), group, place, alone=alone)


def refuse_nonfinite(norm: Tensor, found: Found) -> NoReturn:
    """Raise with the first parameters and their ranks."""
    culprits = name_culprits(found) or "every gradient is finite, but the norm is beyond its dtype"
    raise NonFiniteError(
        f"the norm of the gradients is {norm.item()}, so they cannot be clipped: "
        f"{culprits}. Skip the "
        "step (a GradScaler does by itself), or pass error_if_nonfinite=False"
    )

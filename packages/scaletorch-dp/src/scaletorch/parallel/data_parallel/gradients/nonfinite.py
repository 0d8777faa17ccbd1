"""Which gradients are infinite or NaN, and on which ranks."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ....dist import all_gather_object, get_rank
from ....dist.errors import NonFiniteError
from ...pg_manager import get_process_group_manager
from ..shards import settled_shards

Found = list[tuple[str, str]]  # a parameter's name, and a rank's place
SHOWN = 3  # parameters, and ranks of each, that an error names


def nonfinite_names(model: nn.Module) -> list[str]:
    """Return this rank's parameters whose gradients, or shards of them, are not all finite."""
    held = [s for s in settled_shards(model) if s.tensor.grad is not None and s.stop > s.start]
    if not held:
        return []
    gradients = [shard.tensor.grad for shard in held]
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
        alone: Ask this rank alone, where others have the same.
    """
    return share_names(nonfinite_names(model), group, place, alone=alone)


def share_names(
    names: list[str], group: ProcessGroup | None, place: str | None = None, *, alone: bool = False
) -> Found:
    """Return all ranks' names by rank; arguments as for `found_on_ranks`."""
    if place is None:
        manager = get_process_group_manager()
        rank = get_rank()
        place = f"rank {rank}" if manager is None else str(manager.grid.coordinates(rank))
    mine = (place, names)
    everyone: list[tuple[str, list[str]]] = [mine] if alone else all_gather_object(mine, group)
    return [(name, place) for place, names in everyone for name in names]


def refuse_nonfinite(norm: Tensor, found: Found) -> NoReturn:
    """Raise with the first parameters and their ranks."""
    culprits = name_culprits(found) or "every gradient is finite, but the norm is beyond its dtype"
    raise NonFiniteError(
        f"the norm of the gradients is {norm.item()}, so they cannot be clipped: "
        f"{culprits}. Skip the "
        "step (a GradScaler does by itself), or pass error_if_nonfinite=False"
    )


def name_culprits(found: Found) -> str:
    """Return the first parameters with their ranks as text, empty if there are none."""
    places: dict[str, list[str]] = {}
    for name, place in found:
        places.setdefault(name, []).append(place)
    shown = [f"{name} on {_first(ranks)}" for name, ranks in places.items()][:SHOWN]
    more = len(places) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")


def _first(ranks: list[str]) -> str:
    more = len(ranks) - SHOWN
    return ", ".join(ranks[:SHOWN]) + (f" and {more} more" if more > 0 else "")

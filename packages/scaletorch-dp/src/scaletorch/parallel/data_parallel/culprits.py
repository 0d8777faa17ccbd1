"""Naming parameters in errors, and the ranks on which something is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import ProcessGroup

from ...dist import all_gather_object, get_rank
from ..pg_manager import get_process_group_manager

Found = list[tuple[str, str]]  # a parameter's name, and a rank's place
SHOWN = 3  # parameters, and ranks of each, that an error names


def shortened(names: Sequence[str]) -> str:
    """Return the first names as text."""
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


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

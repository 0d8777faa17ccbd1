"""Names of parameters and ranks in error messages."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import ProcessGroup

from ...dist import all_gather_object, get_rank
from ..pg_manager import get_process_group_manager

Found = list[tuple[str, str]]  # names of parameters, each with the name of a rank
SHOWN = 3  # parameters in an error, and ranks of each


def shorten(names: Sequence[str]) -> str:
    """Join the first names to a text."""
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def share_names(
    names: list[str], group: ProcessGroup | None, place: str | None = None, *, alone: bool = False
) -> Found:
    """Return the names from all ranks, each with its rank; arguments as of `found_on_ranks`."""
    if place is None:
        manager = get_process_group_manager()
        rank = get_rank()
        place = f"rank {rank}" if manager is None else str(manager.grid.coordinates(rank))
    mine = (place, names)
    everyone: list[tuple[str, list[str]]] = [mine] if alone else all_gather_object(mine, group)
    return [(name, place) for place, names in everyone for name in names]


def name_culprits(found: Found) -> str:
    """Describe the first parameters with their ranks; empty if there are none."""
    places: dict[str, list[str]] = {}
    for name, place in found:
        places.setdefault(name, []).append(place)
    shown = []
    for name, ranks in [*places.items()][:SHOWN]:
        more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
        shown.append(f"{name} on {', '.join(ranks[:SHOWN])}{more}")
    more = f"; and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    return "; ".join(shown) + more

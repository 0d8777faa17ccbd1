"""The parameters that a wrapper synchronises, and their names in error messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from torch.distributed import ProcessGroup

from ...dist import all_gather_object, get_rank
from ...dist.errors import InvalidArgumentError
from ..pg_manager import describe_rank, get_process_group_manager

Named = Sequence[tuple[str, nn.Parameter]]
Groups = list[tuple[ProcessGroup | None, list[tuple[str, nn.Parameter]]]]
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


def group_parameters(
    parameters: Named, group: ProcessGroup | None, groups: Mapping[str, ProcessGroup | None]
) -> Groups:
    """Return each group with the parameters to be summed over it; the default group first."""
    unknown = sorted(groups.keys() - {name for name, _ in parameters})
    if unknown:
        raise InvalidArgumentError(
            f"{describe_rank()}: groups contains {shorten(unknown)}, which are not parameters of "
            "the module (a shared parameter goes by its first name)"
        )
    found: dict[int, tuple[ProcessGroup | None, list[tuple[str, nn.Parameter]]]]
    found = {id(group): (group, [])}
    for name, parameter in parameters:
        wanted = groups.get(name, group)
        found.setdefault(id(wanted), (wanted, []))[1].append((name, parameter))
    return list(found.values())


def describe(
    parameters: Iterable[tuple[str, nn.Parameter]], options: Mapping[str, object]
) -> list[str]:
    """List facts that ranks must agree on: a line for the options and one for each parameter."""
    lines = [", ".join(f"{name}={value}" for name, value in options.items())]
    for name, parameter in parameters:
        frozen = "" if parameter.requires_grad else " frozen"
        lines.append(f"{name} {tuple(parameter.shape)} {parameter.dtype}{frozen}")
    return lines

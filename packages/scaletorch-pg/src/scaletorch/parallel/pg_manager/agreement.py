"""What all ranks find out together before groups are made: that they were given one layout."""

from __future__ import annotations

from typing import NoReturn

from ...dist import MismatchError, all_gather_object, get_rank
from ...dist.building import agree
from .grid import Grid
from .layouts import short_ranks


def agree_on_layout(grid: Grid | None, number: int) -> int:
    """Compare the layout with all ranks', and agree on the highest `number`.

    A collective over the default group: one all-gather of 24 bytes a rank.

    Args:
        grid: The layout this rank was given; None if its sizes are no layout.
        number: This rank's offer.

    Returns:
        The highest offer of any rank.

    Raises:
        MismatchError: On every rank, naming the ranks that differ and both layouts.
    """
    layout = "sizes that are no layout" if grid is None else str(grid)
    try:
        return max(agree("the layout", [layout], note=number))
    except MismatchError:  # on all ranks; its lines are by rank, and a layout is of many
        _report(layout)


def _report(layout: str) -> NoReturn:
    """Collect every rank's layout and name the odd ones out; all ranks come here together."""
    given: dict[str, list[int]] = {}
    for rank, theirs in enumerate(all_gather_object(layout)):
        given.setdefault(theirs, []).append(rank)
    (usual, most), *others = sorted(given.items(), key=lambda item: -len(item[1]))
    odd = "; ".join(f"{_ranks(ranks)} {layout}" for layout, ranks in others)
    raise MismatchError(
        f"ranks were given different layouts: {_ranks(most)} {usual}, but {odd} "
        f"(this is rank {get_rank()}); call it with the same sizes on every rank"
    ) from None


def _ranks(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {short_ranks(ranks)}"

"""What all ranks find out together: the same layout at first, all groups made at last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from ...dist import MismatchError, all_gather, all_reduce, get_comm_device, get_rank
from .grid import Grid
from .layouts import short_ranks

# Stands for sizes that are no layout at all.
NO_LAYOUT = (0, 0, 0, 0)


def agree(grid: Grid | None, number: int) -> int:
    """Compare the layout with all ranks', and agree on the highest ``number``.

    A collective over the default group: one all-reduce, whatever the number of ranks.

    Args:
        grid: The layout this rank was given; None where its sizes are no layout.
        number: This rank's offer.

    Returns:
        The highest offer of any rank.

    Raises:
        MismatchError: On every rank, naming the ranks that differ and both layouts.
    """
    sizes = NO_LAYOUT if grid is None else _sizes(grid)
    offer = torch.tensor([number, *sizes, *(-size for size in sizes)], device=get_comm_device())
    all_reduce(offer, op="max")
    highest, *bounds = offer.tolist()
    if [-bound for bound in bounds[4:]] != bounds[:4]:
        _report(sizes)
    return int(highest)


def highest_failed_rank(failed: bool) -> int | None:
    """Wait for all ranks; returns the highest rank that ``failed``, or None.

    A collective over the default group.
    """
    mark = torch.tensor([get_rank() if failed else -1], device=get_comm_device())
    all_reduce(mark, op="max")
    rank = int(mark.item())
    return None if rank < 0 else rank


def _sizes(grid: Grid) -> tuple[int, int, int, int]:
    limit = 2**62  # what int64 can carry and negate
    return (
        min(grid.tp, limit),
        min(grid.cp, limit),
        min(grid.pp, limit),
        min(grid.dp, limit),
    )


def _report(sizes: Sequence[int]) -> NoReturn:
    """Collect every rank's layout and name the odd ones out; all ranks come here together."""
    own = torch.tensor(sizes, device=get_comm_device())
    given: dict[tuple[int, ...], list[int]] = {}
    for rank, tensor in enumerate(all_gather(own)):
        given.setdefault(tuple(tensor.tolist()), []).append(rank)
    (usual, ranks), *others = sorted(given.items(), key=lambda item: -len(item[1]))
    odd = "; ".join(f"{_ranks(ranks)} {_layout(layout)}" for layout, ranks in others)
    message = (
        f"ranks were given different layouts: {_ranks(ranks)} {_layout(usual)}, but {odd} "
        f"(this is rank {get_rank()}); call it with the same four sizes on every rank"
    )
    raise MismatchError(message)


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {short_ranks(ranks)}"


def _layout(sizes: Sequence[int]) -> str:
    return "sizes that are no layout" if sizes == NO_LAYOUT else str(Grid(*sizes))

"""What ranks tell one another of the rows that loops over experts ask for, before these travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from ....dist import get_comm_device, get_rank
from ....dist.building import agree, all_to_all_flat
from ..exchange.routes import digest_of
from ..exchange.shares import ranges_of
from ..exchange.travel import landed
from ..module import Division

DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16  # of rows
NOT_ASKED = -1  # the count of an expert that nobody called, not even on no rows


@dataclass(frozen=True, slots=True)
class Traffic:
    """How rows travel.

    Attributes:
        width: H.
        dtype: Of the rows.
        backward: Whether any rank needs gradients of rows.
        sends: Rows for each rank.
        pieces: Rows of each rank for each expert here; `NOT_ASKED` if none was called.
    """

    width: int
    dtype: torch.dtype
    backward: bool
    sends: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...]

    @property
    def receives(self) -> tuple[int, ...]:
        """Rows from each rank."""
        return tuple(sum(max(n, 0) for n in each) for each in self.pieces)


def counts_of_asked(
    asked: list[int], sizes: list[int], shares: Sequence[int], division: Division
) -> list[int]:
    """Return how many rows of this rank's share are for each expert, `NOT_ASKED` if none asks."""
    rank = get_rank(division.tokens) if len(shares) > 1 else 0
    begin, counts, start = sum(shares[:rank]), [NOT_ASKED] * sum(division.counts), 0
    end = begin + shares[rank]
    for expert, rows in zip(asked, sizes, strict=True):
        within = max(min(start + rows, end) - max(start, begin), 0)
        counts[expert] = max(counts[expert], 0) + within
        start += rows
    return counts


def tell(
    rows: Tensor | None, counts: list[int], division: Division, error: Exception | None
) -> Traffic | None:
    """Tell all ranks what this one asks for, and hear it of them; None if nobody asks anything.

    Raises:
        InvalidArgumentError: There was an error here.
        MismatchError: There was one elsewhere, or ranks differ.
    """
    group, ranges = division.group, ranges_of(division.counts)
    lines = _lines(rows, division)
    width, dtype = (0, 0) if rows is None else (rows.shape[1], DTYPES.index(rows.dtype))
    needs = rows is not None and rows.requires_grad and torch.is_grad_enabled()
    mine = [digest_of(*lines[:2]), error is not None, needs, width, dtype]
    told = [[*mine, *(counts[expert] for expert in own)] for own in ranges]
    message = torch.tensor([*chain(*told)], dtype=torch.int64, device=get_comm_device(group))
    length = len(mine) + len(division.own)
    exchange = all_to_all_flat(message, [*map(len, told)], [length] * len(told), group)
    (came,) = landed([exchange])
    # Of each rank: what must be the same on all, whether it is wrong, and what it needs and asks.
    digests, wrong, backward, widths, dtypes, *asked = came.view(-1, length).t().tolist()
    sorts = {sort for sort in zip(widths, dtypes, strict=True) if sort[0]}
    if len(sorts) > 1 or any(wrong) or len({*digests}) > 1:
        agree(f"a call of the experts '{division.name}'", lines, group, error=error)
    if not sorts:
        return None
    ((width, dtype),) = sorts
    sends = tuple(sum(max(counts[expert], 0) for expert in own) for own in ranges)
    return Traffic(width, DTYPES[dtype], any(backward), sends, tuple(zip(*asked, strict=True)))


def _lines(rows: Tensor | None, division: Division) -> list[str]:
    """Return what must be the same on all ranks, the last only where something is asked for."""
    return [
        f"experts on the ranks {division.counts}",
        f"gradients {'on' if torch.is_grad_enabled() else 'off'}",
        "nothing" if rows is None else f"hidden size {rows.shape[1]}, {rows.dtype}",
    ]

"""Whole tensors of the small batch, joined from what ranks hold of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...dist import all_gather
from ...parallel.context_parallel import ShardedSequences, contiguous
from ...parallel.pg_manager import ProcessGroupManager
from ..state import of_all_stages


class _Form(NamedTuple):
    """Where a tensor has its rows and its positions.

    Attributes:
        rows: The dim of rows.
        positions: That of positions; None if it has none, or if they are in the dim of rows.
        flat: Tokens of all rows in one dim, the positions of each row together.
        shared: Each tp rank has a share of the positions.
    """

    rows: int
    positions: int | None
    flat: bool = False
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Joiner:
    """Joins what ranks hold of tensors of the small batch.

    Attributes:
        manager: The grid.
        sequences: Which positions this rank has; None if they are not known.
        rows: Of the whole batch.
        micro_batches: Of each data-parallel rank.
        device: Where whole tensors are to be.
    """

    manager: ProcessGroupManager
    sequences: ShardedSequences | None
    rows: int
    micro_batches: int
    device: torch.device

    def join(
        self, parts: Sequence[Tensor | None] | None, stage_rank: int, shape: torch.Size
    ) -> Tensor | None:
        """Return a whole tensor; all ranks call it with the same shape.

        Args:
            parts: This rank's parts, one for each micro-batch; any on ranks of other stages.
            stage_rank: The pipeline rank that has them.
            shape: Of the whole.

        Returns:
            The tensor, rows and positions in the order of one process; None if a part is missing,
            or no dims of rows and positions lead to this shape.
        """
        held = self._held(parts, stage_rank)
        found = [part for part in held if part is not None]
        if len(found) < len(held):
            return None
        form = self._form(found[0].shape, shape)
        if form is None or len({part.shape for part in found}) > 1:
            return None
        return self._joined([part.contiguous() for part in found], form, shape)

    def _held(
        self, parts: Sequence[Tensor | None] | None, stage_rank: int
    ) -> Sequence[Tensor | None]:
        """Return the parts of the stage that has them, on every rank of its pipeline."""
        own = parts if parts is not None and self.manager.pp_rank == stage_rank else ()
        sent = {str(index): part for index, part in enumerate(own) if part is not None}
        held = of_all_stages(sent, self.manager)
        return [held.get(str(index)) for index in range(self.micro_batches)]

    def _form(self, part: torch.Size, whole: torch.Size) -> _Form | None:
        """Return how parts make up a whole of this shape."""
        dims = range(len(whole))
        # One shard, if positions are not known.
        layout = contiguous(whole[1] if len(whole) > 2 else 1, 1)
        if self.sequences is not None:
            layout = self.sequences.layout
        rows, own = self._rows_of_a_part, layout.local_length
        shares = {own: False}
        if self.manager.tp_size > 1 and own % self.manager.tp_size == 0:
            shares[own // self.manager.tp_size] = True
        if len(part) != len(whole):
            return None

        def fits(sizes: Mapping[int, tuple[int, int]]) -> bool:
            wanted = {**{d: (whole[d], whole[d]) for d in dims}, **sizes}
            return all((part[d], whole[d]) == wanted[d] for d in dims)

        pairs = sorted((p, r) for r in dims for p in dims if r != p)
        for p, r in [(1, 0), *pairs] if len(whole) > 1 else ():
            for size, shared in shares.items():
                if fits({r: (rows, self.rows), p: (size, layout.length)}):
                    return _Form(r, p, shared=shared)
        for size, shared in shares.items():
            if fits({0: (rows * size, self.rows * layout.length)}):
                return _Form(0, None, flat=True, shared=shared)
        return next((_Form(r, None) for r in dims if fits({r: (rows, self.rows)})), None)

    @property
    def _rows_of_a_part(self) -> int:
        """The number of rows in one micro-batch of a rank."""
        return self.rows // (self.manager.dp_size * self.micro_batches)

    def _joined(self, parts: list[Tensor], form: _Form, shape: torch.Size) -> Tensor:
        manager, rows, positions = self.manager, form.rows, form.positions
        if form.flat:
            parts = [part.unflatten(0, (self._rows_of_a_part, -1)) for part in parts]
            rows, positions = 0, 1
        whole = torch.cat(parts, rows)
        if form.shared:
            whole = torch.cat(all_gather(whole, manager.tp_group), positions or 0)
        if positions is not None and self.sequences is not None and manager.cp_size > 1:
            whole = self.sequences.unshard(whole, positions)
        if manager.dp_size > 1:
            whole = torch.cat(all_gather(whole.contiguous(), manager.dp_group), rows)
        return whole.reshape(shape)

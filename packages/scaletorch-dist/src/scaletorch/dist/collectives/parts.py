"""Exchanging the parts of a flat tensor, one a rank, and reducing what comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..neighbours import calls
from ..neighbours.neighbours import neighbours_of
from .raw import MOVABLE, all_to_all_single, movable, reduce_scatter_single, route
from .recipes import Recipe, reduce_blocks


def exchange_parts(
    data: Tensor,
    counts: Sequence[int],
    received_counts: Sequence[int],
    group: ProcessGroup,
    async_op: bool = False,
) -> tuple[Tensor, Any]:
    """Send the group's rank i its part of flat `data`; return what comes, and the handle.

    Args:
        data: flat tensor of any dtype, on the group's device; the parts in rank order.
        counts: elements for each rank.
        received_counts: elements from each rank; they are joined in rank order.
        group: the ranks.
        async_op: return before it has come.
    """
    received = data.new_empty(sum(received_counts))
    scale = 1 if data.dtype in MOVABLE else data.element_size()
    handle = all_to_all_single(
        movable(received),
        movable(data),
        [count * scale for count in received_counts],
        [count * scale for count in counts],
        group,
        async_op,
    )
    return received, handle


def as_one(parts: Sequence[Tensor]) -> Tensor:
    """Return flat contiguous tensors of one dtype joined, to be read only.

    Nothing is copied where they lie one after another in one memory, as the chunks of a tensor do.
    """
    filled = [part for part in parts if part.numel()]
    if not filled:
        return parts[0]
    memory, end = filled[0].untyped_storage().data_ptr(), filled[0].data_ptr()
    for part in filled:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != memory:
            return torch.cat(filled)
        end += part.nbytes
    return filled[0].as_strided((sum(part.numel() for part in filled),), (1,))


def reduce_parts(
    data: Tensor,
    counts: Sequence[int],
    recipe: Recipe,
    group: ProcessGroup,
    async_op: bool = False,
) -> tuple[Callable[[], Tensor], Any]:
    """Reduce the parts of every rank's flat `data` that are for this one.

    Args:
        data: flat tensor, on the group's device; the parts in rank order.
        counts: elements for each rank.
        recipe: how to reduce them.
        group: the ranks.
        async_op: return before it is done.

    Returns:
        What gives the reduced part, still packed, and the handle to await before.
    """
    own = counts[group.rank()]
    way = route(data, group)
    even = min(counts) == max(counts)
    if even and way.backend != "gloo" and way.lacks.isdisjoint((recipe.run, "reduce_scatter")):
        packed = recipe.pack(data)
        output = packed.new_empty(own)
        handle = reduce_scatter_single(output, packed, recipe.raw, group, async_op)
        return partial(_given, output, keep=packed), handle
    if near := neighbours_of(data, group, async_op):
        reduced = calls.reduce_parts(near, data, counts, recipe.run, recipe.pack)
        return partial(_given, reduced, keep=data), None
    # Direct exchange, then one pass over what came: quicker on TCP, and in rank order.
    received, handle = exchange_parts(data, counts, [own] * len(counts), group, async_op)
    return partial(_reduced, received, len(counts), own, recipe, keep=data), handle


def _given(output: Tensor, keep: Tensor) -> Tensor:
    return output


def _reduced(received: Tensor, size: int, own: int, recipe: Recipe, keep: Tensor) -> Tensor:
    return reduce_blocks(recipe.pack(received).view(size, own), recipe.run)

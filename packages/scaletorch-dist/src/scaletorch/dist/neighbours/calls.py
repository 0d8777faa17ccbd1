"""Collectives through the memory of neighbours: every rank reads its own where the others have it.

What is reduced, is in rank order, each rank's share by that rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ..collectives.recipes import Pack, reduce_blocks
from ..info import group_ranks
from .neighbours import Addresses, Neighbours, Phase

PIECE = 1 << 16  # elements that are reduced at a time: few enough to stay in a cache


def all_reduce(near: Neighbours, data: Tensor, run: str) -> None:
    """Reduce a packed contiguous tensor in place, by an operation that a recipe runs."""
    flat = data.view(-1)
    shares = _shares(flat.numel(), near.group.size())
    own = shares[near.group.rank()]
    reduce_own = partial(_reduce_into, near, flat, flat[own.start : own.stop], own, run)
    read_others = partial(_read_shares, near, flat, shares, 0)
    near.take_turns(data.nbytes, [data.data_ptr()], [reduce_own, read_others])


def reduce(near: Neighbours, data: Tensor, dst: int, run: str) -> None:
    """Reduce a packed contiguous tensor in place on global rank `dst`; others keep theirs."""
    flat = data.view(-1)
    shares = _shares(flat.numel(), near.group.size())
    own = shares[near.group.rank()]
    mine = group_ranks(near.group)[near.group.rank()] == dst
    reduced = flat[own.start : own.stop] if mine else flat.new_empty(len(own))
    phases: list[Phase] = [partial(_reduce_into, near, flat, reduced, own, run), _nothing]
    if mine:
        phases[1] = partial(_read_shares, near, flat, shares, 1)
    start = reduced.data_ptr() - own.start * flat.element_size()  # as if it were the whole
    near.take_turns(data.nbytes, [data.data_ptr(), start], phases)


def reduce_parts(
    near: Neighbours, data: Tensor, counts: Sequence[int], run: str, pack: Pack
) -> Tensor:
    """Return this rank's part of the sum of flat tensors, packed.

    Args:
        near: The ranks.
        data: Flat; the parts in rank order.
        counts: Elements for each rank.
        run: The operation that a recipe runs.
        pack: Makes of a piece what is reduced.
    """
    before = sum(counts[: near.group.rank()])
    own = range(before, before + counts[near.group.rank()])
    reduced: list[Tensor] = []

    def reduce_own(everyone: Addresses) -> None:
        reduced.extend(piece for _, piece in _reduced(near, data, everyone, own, run, pack))

    near.take_turns(data.nbytes, [data.data_ptr()], [reduce_own])
    return torch.cat(reduced) if reduced else pack(data[:0])


def all_gather(near: Neighbours, rows: Tensor, data: Tensor) -> None:
    """Fill the rows of a contiguous tensor with the contiguous tensors of all ranks."""
    blocks = rows.view(near.group.size(), -1)

    def read_all(everyone: Addresses) -> None:
        for rank, (block, (address, *_)) in enumerate(zip(blocks, everyone, strict=True)):
            near.read(block, rank, address)

    near.take_turns(data.nbytes, [data.data_ptr()], [read_all])


def gather(near: Neighbours, rows: Tensor | None, data: Tensor) -> None:
    """Do so on the rank that has rows."""
    if rows is None:
        near.take_turns(data.nbytes, [data.data_ptr()], [_nothing])
    else:
        all_gather(near, rows, data)


def broadcast(near: Neighbours, data: Tensor, src: int) -> None:
    """Fill a contiguous tensor with that of global rank `src`."""
    root = group_ranks(near.group).index(src)

    def read_root(everyone: Addresses) -> None:
        near.read(data, root, everyone[root][0])

    near.take_turns(data.nbytes, [data.data_ptr()], [read_root])


def scatter(near: Neighbours, data: Tensor, parts: Sequence[Tensor] | None, src: int) -> None:
    """Fill a contiguous tensor with the entry for this rank of the list of global rank `src`."""
    root, me = group_ranks(near.group).index(src), near.group.rank()

    def read_own(everyone: Addresses) -> None:
        near.read(data, root, everyone[root][me])

    near.take_turns(data.nbytes, [part.data_ptr() for part in parts or ()], [read_own])


def all_to_all(near: Neighbours, received: Tensor, sent: Tensor) -> None:
    """Fill block i of a contiguous tensor with rank i's block for this rank."""
    blocks, me = received.view(near.group.size(), -1), near.group.rank()

    def read_blocks(everyone: Addresses) -> None:
        for rank, (block, (address, *_)) in enumerate(zip(blocks, everyone, strict=True)):
            near.read(block, rank, address + me * block.nbytes)

    near.take_turns(sent.nbytes, [sent.data_ptr()], [read_blocks])


def _shares(elements: int, ranks: int) -> list[range]:
    bounds = [elements * rank // ranks for rank in range(ranks + 1)]
    return [range(*pair) for pair in pairwise(bounds)]


def _reduce_into(
    near: Neighbours, flat: Tensor, target: Tensor, own: range, run: str, everyone: Addresses
) -> None:
    for at, piece in _reduced(near, flat, everyone, own, run):
        target[at - own.start : at - own.start + piece.numel()].copy_(piece)


def _reduced(
    near: Neighbours,
    flat: Tensor,
    everyone: Addresses,
    own: range,
    run: str,
    pack: Pack | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield a range of all ranks' flat tensors reduced, piece by piece, and where each begins."""
    for at in range(own.start, own.stop, PIECE):
        mine = flat[at : min(at + PIECE, own.stop)]
        blocks = []
        for rank, (address, *_) in enumerate(everyone):
            block = mine if rank == near.group.rank() else torch.empty_like(mine)
            near.read(block, rank, address + at * flat.element_size())
            blocks.append(block if pack is None else pack(block))
        yield at, reduce_blocks(blocks, run)


def _read_shares(
    near: Neighbours, flat: Tensor, shares: Sequence[range], which: int, everyone: Addresses
) -> None:
    for rank, share in enumerate(shares):
        if rank != near.group.rank():
            address = everyone[rank][which] + share.start * flat.element_size()
            near.read(flat[share.start : share.stop], rank, address)


def _nothing(everyone: Addresses) -> None:
    pass

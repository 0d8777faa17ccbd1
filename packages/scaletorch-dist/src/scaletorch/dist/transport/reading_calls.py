"""Collectives through the memory of neighbours: every rank reads its own where the others have it.

What is reduced, is in rank order, each rank's share by that rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from ..wire.recipes import Pack
from ..wire.sums import fold, sum_dtype
from ..world.info import group_ranks
from .neighbours import Addresses, Neighbours

PIECE = 1 << 16  # elements that are reduced at a time: few enough to stay in a cache


def all_reduce(near: Neighbours, tensors: Sequence[Tensor], run: str) -> None:
    """Reduce packed contiguous tensors in place, `MOST` at the most, by what a recipe runs."""
    flats = [data.view(-1) for data in tensors]
    shares = [_shares(flat.numel(), near.group.size()) for flat in flats]

    def reduce_own(everyone: Addresses) -> None:
        for place, (flat, parts) in enumerate(zip(flats, shares, strict=True)):
            own = parts[near.group.rank()]
            _reduce(near, flat, flat[own.start : own.stop], own, run, _at(place, everyone))

    def read_others(everyone: Addresses) -> None:
        for place, (flat, parts) in enumerate(zip(flats, shares, strict=True)):
            _read_shares(near, flat, parts, _at(place, everyone))

    length = sum(data.nbytes for data in tensors)
    near.take_turns(length, [data.data_ptr() for data in tensors], [reduce_own, read_others])


def reduce(near: Neighbours, data: Tensor, dst: int, run: str) -> None:
    """Reduce a packed contiguous tensor in place on global rank `dst`; others keep theirs."""
    flat = data.view(-1)
    shares = _shares(flat.numel(), near.group.size())
    own = shares[near.group.rank()]
    mine = group_ranks(near.group)[near.group.rank()] == dst
    reduced = flat[own.start : own.stop] if mine else flat.new_empty(len(own))

    def reduce_own(everyone: Addresses) -> None:
        _reduce(near, flat, reduced, own, run, _at(0, everyone))

    def read_others(everyone: Addresses) -> None:
        if mine:
            _read_shares(near, flat, shares, _at(1, everyone))

    start = reduced.data_ptr() - own.start * flat.element_size()  # as if it were the whole
    near.take_turns(data.nbytes, [data.data_ptr(), start], [reduce_own, read_others])


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
    reduced = data.new_empty(len(own), dtype=sum_dtype(pack(data[:0]).dtype))

    def reduce_own(everyone: Addresses) -> None:
        _reduce(near, data, reduced, own, run, _at(0, everyone), pack)

    near.take_turns(data.nbytes, [data.data_ptr()], [reduce_own])
    return reduced


def all_gather(near: Neighbours, rows: Tensor, data: Tensor) -> None:
    """Fill the rows of a contiguous tensor with the contiguous tensors of all ranks."""
    blocks = rows.view(near.group.size(), -1)

    def read_all(everyone: Addresses) -> None:
        for rank, (block, (address, *_)) in enumerate(zip(blocks, everyone, strict=True)):
            near.read(block, rank, address)

    near.take_turns(data.nbytes, [data.data_ptr()], [read_all])


def gather_flat(near: Neighbours, data: Tensor, ranges: Sequence[range]) -> None:
    """Fill a flat tensor with the ranges of it that the ranks have."""

    def read_others(everyone: Addresses) -> None:
        _read_shares(near, data, ranges, _at(0, everyone))

    near.take_turns(data.nbytes, [data.data_ptr()], [read_others])


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


def _reduce(
    near: Neighbours,
    flat: Tensor,
    target: Tensor,
    own: range,
    run: str,
    addresses: Sequence[int],
    pack: Pack | None = None,
) -> None:
    """Reduce a range of all ranks' flat tensors into `target`, which may be that range itself."""
    me = near.group.rank()
    in_place = target.data_ptr() == flat[own.start : own.stop].data_ptr()
    scratch = [flat.new_empty(min(PIECE, len(own))) for _ in addresses]
    for at in range(own.start, own.stop, PIECE):
        size = min(PIECE, own.stop - at)
        blocks = [each[:size] for each in scratch]
        for rank, address in enumerate(addresses):
            if rank == me and (in_place or rank > 0):  # the first block is changed
                blocks[rank] = flat[at : at + size]
            else:
                near.read(blocks[rank], rank, address + at * flat.element_size())
        piece = fold(blocks if pack is None else [pack(b) for b in blocks], run, spoil=True)
        there = target[at - own.start : at - own.start + size]
        if piece.data_ptr() != there.data_ptr():
            there.copy_(piece)


def _read_shares(
    near: Neighbours, flat: Tensor, shares: Sequence[range], addresses: Sequence[int]
) -> None:
    for rank, share in enumerate(shares):
        if rank != near.group.rank():
            address = addresses[rank] + share.start * flat.element_size()
            near.read(flat[share.start : share.stop], rank, address)


def _at(place: int, everyone: Addresses) -> list[int]:
    return [row[place] for row in everyone]


def _nothing(everyone: Addresses) -> None:
    pass

"""The way by host memory: large tensors of processes of one host, which read one another's.

Reading takes turns, in which all ranks are at one call: it serves synchronous calls alone. What is
reduced, is in rank order, each rank's share by that rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup

from ..wire.recipes import Pack, Recipe
from ..wire.sums import even_parts, fold, parts_of, sum_dtype
from ..world.info import group_ranks, info_of
from . import neighbours
from .neighbours import MOST, Addresses, Neighbours

T = TypeVar("T")
Done = Callable[[Tensor], T]
Entries = Sequence[Tensor] | None  # one for each rank, on the rank that has them

PIECE = 1 << 16  # elements that are reduced at a time: few enough to stay in a cache


def memory_way(group: ProcessGroup) -> MemoryWay | None:
    """Return the way by host memory, None if the ranks cannot read one another's."""
    info = info_of(group)
    if info.memory is ...:
        near = neighbours.find(group)
        info.memory = None if near is None else MemoryWay(near)
    return info.memory  # type: ignore[no-any-return]


def way_together(tensors: Sequence[Tensor], group: ProcessGroup) -> MemoryWay | None:
    """Return the way by host memory if it serves one call for several tensors, else None."""
    if sum(data.nbytes for data in tensors) < neighbours.LEAST:
        return None
    if info_of(group).levels is not None or not all(data.is_cpu for data in tensors):
        return None
    return memory_way(group)


class MemoryWay:
    """How tensors travel if the ranks can read one another's memory; calls as in `ways.Way`.

    Attributes:
        near: The ranks.
        spoils: As in `ways.Way`.
    """

    __slots__ = ("near",)

    spoils = False

    def __init__(self, near: Neighbours) -> None:
        self.near = near

    @property
    def group(self) -> ProcessGroup:
        """The ranks."""
        return self.near.group

    def all_reduce(self, buffer: Tensor, recipe: Recipe, done: Done[T], async_op: bool) -> T:
        """Reduce a tensor in place: each rank its range of everybody's, in rank order."""
        self.all_reduce_together([buffer], recipe)
        return done(buffer)

    def all_reduce_together(self, buffers: Sequence[Tensor], recipe: Recipe) -> None:
        """Reduce packed tensors of one dtype in place, many in one turn."""
        for start in range(0, len(buffers), MOST):
            self._all_reduce(buffers[start : start + MOST], recipe.run)

    def _all_reduce(self, tensors: Sequence[Tensor], run: str) -> None:
        near, rank = self.near, self.group.rank()
        flats = [data.view(-1) for data in tensors]
        shares = [_shares(flat, self.group) for flat in flats]

        def reduce_own(everyone: Addresses) -> None:
            for place, (flat, parts) in enumerate(zip(flats, shares, strict=True)):
                own = parts[rank]
                _reduce(near, flat, flat[own.start : own.stop], own, run, _at(place, everyone))

        def read_others(everyone: Addresses) -> None:
            for place, (flat, parts) in enumerate(zip(flats, shares, strict=True)):
                _read_shares(near, flat, parts, _at(place, everyone))

        length = sum(data.nbytes for data in tensors)
        near.take_turns(length, [data.data_ptr() for data in tensors], [reduce_own, read_others])

    def reduce(self, buffer: Tensor, dst: int, recipe: Recipe, done: Done[T], async_op: bool) -> T:
        """Reduce a tensor in place on global rank `dst`; others keep theirs."""
        near, flat, mine = self.near, buffer.view(-1), self._is_mine(dst)
        shares = _shares(flat, self.group)
        own = shares[self.group.rank()]
        reduced = flat[own.start : own.stop] if mine else flat.new_empty(len(own))

        def reduce_own(everyone: Addresses) -> None:
            _reduce(near, flat, reduced, own, recipe.run, _at(0, everyone))

        def read_others(everyone: Addresses) -> None:
            if mine:
                _read_shares(near, flat, shares, _at(1, everyone))

        start = reduced.data_ptr() - own.start * flat.element_size()  # as if it were the whole
        near.take_turns(buffer.nbytes, [buffer.data_ptr(), start], [reduce_own, read_others])
        return done(buffer)

    def reduce_scatter(
        self, data: Tensor, counts: Sequence[int], recipe: Recipe, done: Done[T], async_op: bool
    ) -> T:
        """Reduce to each rank its shard of a flat tensor."""
        own, pack = parts_of(counts)[self.group.rank()], recipe.pack
        reduced = data.new_empty(len(own), dtype=sum_dtype(pack(data[:0]).dtype))

        def reduce_own(everyone: Addresses) -> None:
            _reduce(self.near, data, reduced, own, recipe.run, _at(0, everyone), pack)

        self.near.take_turns(data.nbytes, [data.data_ptr()], [reduce_own])
        return done(reduced)

    def all_gather(self, own: Tensor, done: Done[T], async_op: bool) -> T:
        """Collect the tensors of all ranks in rows of one new tensor."""
        return done(self._gathered(own, here=True))

    def gather(self, own: Tensor, dst: int, done: Done[T], async_op: bool) -> T:
        """Collect the tensors of all ranks on global rank `dst`."""
        return done(self._gathered(own, here=self._is_mine(dst)))

    def _gathered(self, own: Tensor, *, here: bool) -> Tensor:
        rows = own.new_empty((self.group.size() if here else 0, *own.shape))

        def read_all(everyone: Addresses) -> None:
            for rank, row in enumerate(rows):
                self.near.read(row, rank, everyone[rank][0])

        self.near.take_turns(own.nbytes, [own.data_ptr()], [read_all])
        return rows

    def gather_flat(self, data: Tensor, counts: Sequence[int], done: Done[T], async_op: bool) -> T:
        """Fill a flat tensor with the shards of all."""

        def read_others(everyone: Addresses) -> None:
            _read_shares(self.near, data, parts_of(counts), _at(0, everyone))

        self.near.take_turns(data.nbytes, [data.data_ptr()], [read_others])
        return done(data)

    def broadcast(self, buffer: Tensor, src: int, done: Done[T], async_op: bool) -> T:
        """Fill a tensor with that of global rank `src`."""
        root = group_ranks(self.group).index(src)

        def read_root(everyone: Addresses) -> None:
            self.near.read(buffer, root, everyone[root][0])

        self.near.take_turns(buffer.nbytes, [buffer.data_ptr()], [read_root])
        return done(buffer)

    def scatter(
        self, buffer: Tensor, entries: Entries, src: int, done: Done[T], async_op: bool
    ) -> T:
        """Fill a tensor with this rank's entry of the list of global rank `src`."""
        root, me = group_ranks(self.group).index(src), self.group.rank()

        def read_own(everyone: Addresses) -> None:
            self.near.read(buffer, root, everyone[root][me])

        addresses = [entry.data_ptr() for entry in entries or ()]
        self.near.take_turns(buffer.nbytes, addresses, [read_own])
        return done(buffer)

    def all_to_all(self, sent: Tensor, done: Done[T], async_op: bool) -> T:
        """Collect everybody's block for this rank."""
        received, me = sent.new_empty(sent.shape), self.group.rank()

        def read_blocks(everyone: Addresses) -> None:
            for rank, block in enumerate(received.view(self.group.size(), -1)):
                self.near.read(block, rank, everyone[rank][0] + me * block.nbytes)

        self.near.take_turns(sent.nbytes, [sent.data_ptr()], [read_blocks])
        return done(received)

    def _is_mine(self, rank: int) -> bool:
        return group_ranks(self.group)[self.group.rank()] == rank


def _shares(flat: Tensor, group: ProcessGroup) -> list[range]:
    return parts_of(even_parts(flat.numel(), group.size()))


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
    for at in own[::PIECE]:
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

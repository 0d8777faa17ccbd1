"""What is measured: each call, the bytes it is said to move, and its cost on a ring.

As in nccl-tests, the size of a call is that of the whole buffer: what each rank holds for
all_reduce, reduce and broadcast; what all ranks hold together for the calls that split or join.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import dist
from ..collectives.barrier import barrier
from ..world.info import group_ranks

Run = Callable[[], Any]


class Place(NamedTuple):
    """Where a call is measured: a group, this rank in it, and the device of its tensors."""

    group: ProcessGroup
    rank: int
    ranks: tuple[int, ...]
    device: torch.device


class Case(NamedTuple):
    """One call.

    Attributes:
        make: Place, bytes → what runs it once.
        factor: Ranks → bytes that the busiest link carries for each byte of size.
        steps: Ranks → messages one after another, on a ring or (rooted calls) a binary tree.
        split: Whether the size is cut into one part a rank.
        unit: Bytes that the size is rounded up to a multiple of.
        largest: Bytes beyond which it is not measured; None for no limit.
    """

    make: Callable[[Place, int], Run]
    factor: Callable[[int], float]
    steps: Callable[[int], int]
    split: bool = False
    unit: int = 4
    largest: int | None = None

    def size(self, asked: int, ranks: int) -> int:
        """Return the bytes that are measured where `asked` were asked for."""
        unit = self.unit * ranks if self.split else self.unit
        return max(1, math.ceil(asked / unit)) * unit


def place_of(group: ProcessGroup, device: torch.device) -> Place:
    """Return this rank's place in a group."""
    return Place(group, group.rank(), group_ranks(group), device)


def _data(place: Place, size: int) -> Tensor:
    return torch.zeros(size // 4, device=place.device)


def _parts(place: Place, size: int) -> list[Tensor]:
    return list(_data(place, size).chunk(len(place.ranks)))


def _all_reduce(place: Place, size: int) -> Run:
    data = _data(place, size)
    return lambda: dist.all_reduce(data, group=place.group)


def _reduce(place: Place, size: int) -> Run:
    data = _data(place, size)
    return lambda: dist.reduce(data, place.ranks[0], group=place.group)


def _broadcast(place: Place, size: int) -> Run:
    data = _data(place, size)
    return lambda: dist.broadcast(data, place.ranks[0], place.group)


def _all_gather(place: Place, size: int) -> Run:
    own = _data(place, size // len(place.ranks))
    return lambda: dist.all_gather(own, place.group)


def _gather(place: Place, size: int) -> Run:
    own = _data(place, size // len(place.ranks))
    return lambda: dist.gather(own, place.ranks[0], place.group)


def _scatter(place: Place, size: int) -> Run:
    own, parts = _data(place, size // len(place.ranks)), _parts(place, size)
    return lambda: dist.scatter(own, parts, place.ranks[0], place.group)


def _reduce_scatter(place: Place, size: int) -> Run:
    own, parts = _data(place, size // len(place.ranks)), _parts(place, size)
    return lambda: dist.reduce_scatter(own, parts, group=place.group)


def _all_to_all(place: Place, size: int) -> Run:
    data = _data(place, size)
    return lambda: dist.all_to_all(data, place.group)


def _send_recv(place: Place, size: int) -> Run:
    """Every rank sends to the next and receives from the one before."""
    sent, received, count = _data(place, size), _data(place, size), len(place.ranks)
    after, before = (place.ranks[(place.rank + step) % count] for step in (1, -1))
    return lambda: dist.exchange([(sent, after)], [(received, before)], place.group)


def _ping_pong(place: Place, size: int) -> Run:
    """The first two ranks send a message to and fro; half of the time is one way's."""
    data, (first, second, *_) = _data(place, size), place.ranks

    def serve() -> None:
        dist.send(data, second, place.group)
        dist.recv(data, second, place.group)

    def answer() -> None:
        dist.recv(data, first, place.group)
        dist.send(data, first, place.group)

    return {0: serve, 1: answer}.get(place.rank, _nothing)


def _nothing() -> None:
    pass


def _barrier(place: Place, size: int) -> Run:
    return lambda: barrier(place.group)


def _all_gather_object(place: Place, size: int) -> Run:
    data = bytes(size // len(place.ranks))
    return lambda: dist.all_gather_object(data, place.group)


def _gather_object(place: Place, size: int) -> Run:
    data = bytes(size // len(place.ranks))
    return lambda: dist.gather_object(data, place.ranks[0], place.group)


def _broadcast_object(place: Place, size: int) -> Run:
    data = [bytes(size)]
    return lambda: dist.broadcast_object_list(data, place.ranks[0], place.group)


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _twice(ranks: int) -> float:
    return 2 * _share(ranks)


def _once(ranks: int) -> float:
    return 1.0


def _ring(ranks: int) -> int:
    return ranks - 1


def _both_ways(ranks: int) -> int:
    return 2 * (ranks - 1)


def _tree(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


def _one(ranks: int) -> int:
    return 1


CASES: dict[str, Case] = {
    "all_reduce": Case(_all_reduce, _twice, _both_ways),
    "reduce": Case(_reduce, _once, _tree),
    "broadcast": Case(_broadcast, _once, _tree),
    "all_gather": Case(_all_gather, _share, _ring, split=True),
    "gather": Case(_gather, _share, _ring, split=True),
    "scatter": Case(_scatter, _share, _ring, split=True),
    "reduce_scatter": Case(_reduce_scatter, _share, _ring, split=True),
    "all_to_all": Case(_all_to_all, _share, _ring, split=True),
    "send_recv": Case(_send_recv, _once, _one),
    "ping_pong": Case(_ping_pong, _once, _one),
    "barrier": Case(_barrier, _once, _both_ways, largest=0),
    "all_gather_object": Case(_all_gather_object, _share, _ring, split=True, unit=1),
    "gather_object": Case(_gather_object, _share, _ring, split=True, unit=1),
    "broadcast_object_list": Case(_broadcast_object, _once, _tree, unit=1),
}
MESSAGES_THERE_AND_BACK = {"ping_pong"}

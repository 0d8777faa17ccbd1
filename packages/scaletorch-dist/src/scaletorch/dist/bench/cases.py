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

Run = Callable[[], Any]


class Place(NamedTuple):
    """Where a call is measured: a group, this rank in it, and the device of its tensors."""

    group: ProcessGroup
    rank: int
    ranks: tuple[int, ...]
    device: torch.device

    def data(self, size: int) -> Tensor:
        """Return a tensor of so many bytes."""
        return torch.zeros(size // 4, device=self.device)


class Case(NamedTuple):
    """One call.

    Attributes:
        make: Place, bytes, bytes of one rank's share → what runs it once.
        factor: Ranks → bytes that the busiest link carries for each byte of size.
        steps: Ranks → messages one after another, on a ring or (rooted calls) a binary tree.
        split: Whether the size is cut into one share a rank.
    """

    make: Callable[[Place, int, int], Run]
    factor: Callable[[int], float]
    steps: Callable[[int], int]
    split: bool = False

    def size(self, asked: int, ranks: int) -> int:
        """Return the bytes of whole numbers that are measured where `asked` were asked for."""
        unit = 4 * ranks if self.split else 4
        return max(1, math.ceil(asked / unit)) * unit


def _in_place(call: Callable[..., Any]) -> Callable[[Place, int, int], Run]:
    def make(place: Place, size: int, share: int) -> Run:
        data, root = place.data(size), "src" if call is dist.broadcast else "dst"
        rooted = {} if call is dist.all_reduce else {root: place.ranks[0]}
        return lambda: call(data, group=place.group, **rooted)

    return make


def _joining(call: Callable[..., Any]) -> Callable[[Place, int, int], Run]:
    def make(place: Place, size: int, share: int) -> Run:
        own = place.data(share)
        rooted = {"dst": place.ranks[0]} if call is dist.gather else {}
        return lambda: call(own, group=place.group, **rooted)

    return make


def _scatter(place: Place, size: int, share: int) -> Run:
    own, entries = place.data(share), list(place.data(size).chunk(len(place.ranks)))
    return lambda: dist.scatter(own, entries, place.ranks[0], place.group)


def _reduce_scatter(place: Place, size: int, share: int) -> Run:
    own, entries = place.data(share), list(place.data(size).chunk(len(place.ranks)))
    return lambda: dist.reduce_scatter(own, entries, group=place.group)


def _all_to_all(place: Place, size: int, share: int) -> Run:
    data = place.data(size)
    return lambda: dist.all_to_all(data, place.group)


def _send_recv(place: Place, size: int, share: int) -> Run:
    """Every rank sends to the next and receives from the one before."""
    sent, received, count = place.data(size), place.data(size), len(place.ranks)
    after, before = (place.ranks[(place.rank + step) % count] for step in (1, -1))
    return lambda: dist.exchange([(sent, after)], [(received, before)], place.group)


def _ping_pong(place: Place, size: int, share: int) -> Run:
    """The first two ranks send a message to and fro; half of the time is one way's."""
    data, (first, second, *_) = place.data(size), place.ranks

    def serve() -> None:
        dist.send(data, second, place.group)
        dist.recv(data, second, place.group)

    def answer() -> None:
        dist.recv(data, first, place.group)
        dist.send(data, first, place.group)

    return {0: serve, 1: answer}.get(place.rank, lambda: None)


def _barrier(place: Place, size: int, share: int) -> Run:
    return lambda: barrier(place.group)


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _once(ranks: int) -> float:
    return 1.0


def _ring(ranks: int) -> int:
    return ranks - 1


def _tree(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


CASES: dict[str, Case] = {
    "all_reduce": Case(_in_place(dist.all_reduce), lambda n: 2 * _share(n), lambda n: 2 * (n - 1)),
    "reduce": Case(_in_place(dist.reduce), _once, _tree),
    "broadcast": Case(_in_place(dist.broadcast), _once, _tree),
    "all_gather": Case(_joining(dist.all_gather), _share, _ring, split=True),
    "gather": Case(_joining(dist.gather), _share, _ring, split=True),
    "scatter": Case(_scatter, _share, _ring, split=True),
    "reduce_scatter": Case(_reduce_scatter, _share, _ring, split=True),
    "all_to_all": Case(_all_to_all, _share, _ring, split=True),
    "send_recv": Case(_send_recv, _once, lambda n: 1),
    "ping_pong": Case(_ping_pong, _once, lambda n: 1),
    "barrier": Case(_barrier, _once, lambda n: 2 * (n - 1)),
}

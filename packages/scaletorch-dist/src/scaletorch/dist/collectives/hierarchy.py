"""Collectives of groups that span nodes: inside each node, across the nodes, and back.

What crosses nodes is what has to, once, in as many steps as there are nodes and not ranks. All
ranks at one place of their nodes work across at once, each on its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import ProcessGroup

from ..info import get_timeout
from ..local import nodes_of
from .flat import all_gather_flat, even_parts
from .parts import as_one, reduce_parts
from .raw import all_gather_single, movable, process_group, raw_all_reduce, route
from .recipes import Recipe, recipe_for

LEAST = 4096  # bytes; gloo reduces smaller tensors in fewer steps than there are ranks


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """The groups that a group's collectives go through in turn.

    Attributes:
        node: The ranks of this node, in the group's order.
        across: The ranks at this one's place on every node.
        order: For each place the group's ranks that have it on their nodes, in the group's order.
    """

    node: ProcessGroup
    across: ProcessGroup
    order: tuple[tuple[int, ...], ...]

    def all_reduce(self, buffer: Tensor, recipe: Recipe) -> None:
        """Reduce a packed tensor, contiguous, in place."""
        flat = buffer.view(-1)
        counts = even_parts(flat.numel(), self.node.size())
        alike = recipe_for(recipe.run, flat.dtype)  # it is packed already
        reduced, _ = reduce_parts(flat, counts, alike, self.node)
        own = reduced().to(flat.dtype)
        if own.numel():
            raw_all_reduce(own, recipe.raw, self.across)
        flat.split(counts)[self.node.rank()].copy_(own)
        all_gather_flat(flat, counts, self.node)

    def all_gather(self, own: Tensor) -> Tensor:
        """Return the contiguous tensors of all ranks, [ranks, ...], in the group's order."""
        nodes, places = self.across.size(), self.node.size()
        column = own.new_empty((nodes, own.numel()))
        all_gather_single(movable(column).view(-1), movable(own).view(-1), self.across)
        rows = own.new_empty((places, nodes, own.numel()))
        all_gather_single(movable(rows).view(-1), movable(column).view(-1), self.node)
        found = own.new_empty((nodes * places, *own.shape))
        for ranks, column in zip(self.order, rows, strict=True):
            for rank, row in zip(ranks, column, strict=True):
                found[rank].view(-1).copy_(row)
        return found

    def reduce_scatter(self, entries: Sequence[Tensor], recipe: Recipe) -> Tensor:
        """Return this rank's part of the sum, packed and flat.

        Args:
            entries: Flat tensors on the group's device, one for each rank of the group.
            recipe: How to reduce them.
        """
        by_place = [[entries[rank] for rank in ranks] for ranks in self.order]
        counts = [sum(entry.numel() for entry in column) for column in by_place]
        joined = as_one([entry for column in by_place for entry in column])
        inside, _ = reduce_parts(joined, counts, recipe, self.node)
        mine = inside()
        alike = recipe_for(recipe.run, mine.dtype)
        own = [entry.numel() for entry in by_place[self.node.rank()]]
        result, _ = reduce_parts(mine, own, alike, self.across)
        return result()


_known: WeakKeyDictionary[ProcessGroup, Hierarchy] = WeakKeyDictionary()


def use_hierarchy(group: ProcessGroup | None = None) -> bool:
    """Let a group's collectives go inside the nodes first, where that is possible.

    Every rank of the group calls it, once. It is for groups on gloo whose ranks are on several
    nodes, as many on each and more than one; `all_reduce`, `all_gather` and `reduce_scatter` that
    are not asynchronous then go that way. Sums are added in another order than without it.

    Args:
        group: The default group by default.

    Returns:
        Whether they do.

    Raises:
        NotInGroupError: This rank is outside the group.
    """
    members = process_group(group)
    if members is None or members.size() < 4 or members in _known:
        return members in _known
    places = _places(members)
    if places is None or route(torch.empty(0), members).backend != "gloo":
        return False
    ranks = c10d.get_process_group_ranks(members)
    order = tuple(tuple(sorted(each)) for each in zip(*places, strict=True))
    mine = next(node for node in places if members.rank() in node)
    node = _group([ranks[at] for at in mine])
    across = _group([ranks[at] for at in order[mine.index(members.rank())]])
    _known[members] = Hierarchy(node, across, order)
    return True


def hierarchy_of(members: ProcessGroup, async_op: bool) -> Hierarchy | None:
    """Return the hierarchy that a call goes through, if any."""
    return None if async_op or not _known else _known.get(members)


def _places(members: ProcessGroup) -> list[list[int]] | None:
    """Return the group's ranks on each node, or None where there is nothing to gain."""
    nodes: dict[bytes, list[int]] = {}
    for rank, node in enumerate(nodes_of(members)):
        nodes.setdefault(node, []).append(rank)
    sizes = {len(each) for each in nodes.values()}
    alike = len(sizes) == 1 and sizes != {1} and len(nodes) > 1
    return list(nodes.values()) if alike else None


def _group(ranks: list[int]) -> ProcessGroup:
    made: ProcessGroup = c10d.new_group(
        ranks, timeout=get_timeout(), use_local_synchronization=True,
        group_desc="scaletorch_hierarchy",
    )  # fmt: skip
    return made

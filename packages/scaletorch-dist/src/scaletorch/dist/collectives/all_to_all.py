"""all_to_all, for one tensor, for two lists, or for uneven slices of a flat tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import methodcaller
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import InvalidArgumentError, MismatchError
from ..transport.ways import way_of
from ..wire.backend import (
    Async,
    Group,
    Sync,
    Work,
    all_to_all_single,
    as_bytes,
    bring_home,
    gather_ints,
    identity,
    movable,
    on_wire,
    settled,
)
from ..wire.checks import (
    begin,
    check_form_with_list,
    check_list,
    check_target,
    check_tensor,
    checking,
    comparing,
)
from ..wire.recipes import as_one
from ..world.info import get_dist_info, get_world_size, group_ranks


@overload
def all_to_all(data: Tensor, group: Group = ..., async_op: Sync = ...) -> Tensor: ...
@overload
def all_to_all(data: Tensor, group: Group = ..., *, async_op: Async) -> Work[Tensor]: ...
@overload
def all_to_all(
    send_list: Sequence[Tensor],
    recv_list: Sequence[Tensor],
    group: Group = ...,
    async_op: Sync = ...,
) -> None: ...
@overload
def all_to_all(
    send_list: Sequence[Tensor], recv_list: Sequence[Tensor], group: Group = ..., *, async_op: Async
) -> Work[None]: ...
def all_to_all(*args: Any, **options: Any) -> Any:
    """Send one block to every rank, and receive one block from each.

    `all_to_all(data, group=None, async_op=False)` splits dim 0 into one block per rank and returns
    the received blocks joined along dim 0. The ranks first compare their sizes (one small message),
    so that every rank raises if dim 0 of any rank is not divisible.

    `all_to_all(send_list, recv_list, group=None, async_op=False)` sends tensor i to the group's
    rank i and fills tensor j from its rank j. The list to *send* comes first;
    torch.distributed takes it second. Shapes may differ from pair to pair, and nothing is compared.

    Args:
        args: The tensor to split, of the same shape and dtype on every rank; or the list to send
            and the list to fill.
        options: `group` (the default group by default); `async_op` (return a Work at once, whose
            `wait()` returns the tensor, or None after the list is filled).

    Returns:
        The joined blocks in the first form, None in the second.

    Raises:
        InvalidArgumentError: Dim 0 of some rank is not divisible, or the lists do not fit.
        MismatchError: The ranks' shapes or dtypes differ (first form).
        NotInGroupError: This rank is outside the group.
    """
    data = args[0] if args else options.get("data")
    if isinstance(data, Tensor):
        return _all_to_all(*args, **options)
    names, needs = ("send_list", "recv_list"), "a list to send and one to receive into"
    check_form_with_list(args, options, names, "all_to_all", needs)
    return _all_to_all_lists(*args, **options)


def all_to_all_flat(
    data: Tensor, counts: Sequence[int], received_counts: Sequence[int], group: Group = None
) -> Work[Tensor]:
    """Send every rank its slice of a flat tensor, asynchronously; lengths may differ.

    Args:
        data: Flat tensor of any dtype; must not change until `wait()` returns.
        counts: Elements for each rank; the slices lie in rank order.
        received_counts: Elements from each rank, which every rank must know beforehand.
        group: The default group by default.

    Returns:
        A Work; its `wait()` returns the slices for this rank, joined in rank order, in new memory.

    Raises:
        InvalidArgumentError: The counts are not one per rank, or do not add up to `data`.
        MismatchError: Calls are compared, and a rank sends a count that its peer does not expect.
        NotInGroupError: This rank is outside the group.
    """
    check_tensor(data, "all_to_all_flat")
    size = get_world_size(group)
    lengths = len(counts), len(received_counts)
    fits = lengths == (size, size) and min(*counts, *received_counts) >= 0
    fits = fits and (size > 1 or counts[0] == received_counts[0])
    if data.ndim != 1 or not fits or sum(counts) != data.numel():
        raise InvalidArgumentError(
            f"all_to_all_flat takes a flat tensor and its elements for and from each of {size} "
            f"ranks, got shape {tuple(data.shape)}, {list(counts)} and {list(received_counts)}"
        )
    members = begin(group, "all_to_all_flat", str(data.dtype))
    if members is None:
        return Work((), partial(_copied, data))
    if comparing():  # not for a guard alone: it would cost a message for each dispatch of experts
        width = data.element_size()
        ours, theirs = ([count * width for count in each] for each in (counts, received_counts))
        _compare_pairs(ours, theirs, members)
    sent = on_wire(data, members)
    done = identity if sent is data else methodcaller("to", data.device)
    way = way_of(sent, members)
    return cast("Work[Tensor]", way.exchange(sent, counts, received_counts, done, True))


def _all_to_all(data: Tensor, group: Group = None, async_op: bool = False) -> Tensor | Work[Tensor]:
    check_tensor(data, "all_to_all")
    if data.dim() == 0:
        message = "all_to_all cuts dim 0, which a tensor without dims does not have"
        raise InvalidArgumentError(message)
    members = begin(group, "all_to_all", data)
    if members is not None:
        _check_blocks(data, members)
    if members is None or data.numel() == 0:
        return settled((), partial(_copied, data), async_op)
    sent = on_wire(data, members)
    received = torch.empty_like(sent)
    ends = movable(received), movable(sent)
    handle = all_to_all_single(*ends, None, None, members, async_op)
    return settled((handle,), partial(received.to, data.device), async_op, keep=sent)


def _check_blocks(data: Tensor, members: ProcessGroup) -> None:
    """Compare dim 0 and the bytes of one row over the ranks."""
    size = members.size()
    row = data[0].nbytes if data.size(0) else 0
    rows = gather_ints((data.size(0), row), members)
    if rows.count(rows[0]) == size and data.size(0) % size == 0:
        return
    pairs = zip(group_ranks(members), rows, strict=True)
    lengths = ", ".join(f"rank {rank}: {length}" for rank, (length, _) in pairs)
    if any(length % size for length, _ in rows):
        raise InvalidArgumentError(
            f"all_to_all cuts dim 0 into {size} equal blocks, one per rank, so its size must be a "
            f"multiple of {size}; it is: {lengths}. Pad it, or use all_to_all(send_list, recv_list)"
        )
    raise MismatchError(
        f"all_to_all needs one shape and dtype on every rank; dim 0 is: {lengths}; a row has "
        f"{', '.join(str(taken) for _, taken in rows)} bytes. Use all_to_all(send_list, recv_list)"
    )


def _all_to_all_lists(
    send_list: Sequence[Tensor],
    recv_list: Sequence[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Work[None] | None:
    rank, size = get_dist_info(group)
    check_list(send_list, size, "all_to_all", "send_list")
    check_list(recv_list, size, "all_to_all", "recv_list")
    for entry in recv_list:
        check_target(entry, "all_to_all", "recv_list")
    to_self, from_self = send_list[rank], recv_list[rank]
    check_list([from_self], 1, "all_to_all", f"recv_list[{rank}]", like=to_self)
    members = begin(group, "all_to_all with lists")
    if members is None:
        return settled((), partial(bring_home, from_self.detach(), to_self.detach()), async_op)
    sent = [as_bytes(on_wire(entry, members)) for entry in send_list]
    counts = [entry.nbytes for entry in recv_list]
    sizes = [block.numel() for block in sent]
    if checking():
        _compare_pairs(sizes, counts, members)
    joined = as_one(sent)
    done = partial(_distribute, recv_list, counts)
    return way_of(joined, members).exchange(joined, sizes, counts, done, async_op)


def _compare_pairs(sent: list[int], received: list[int], members: ProcessGroup) -> None:
    """Compare the bytes that each rank sends to each peer with the bytes that the peer expects."""
    rows = gather_ints((*sent, *received), members)
    ranks, size = group_ranks(members), len(rows)
    wrong = [
        f"rank {ranks[i]} sends {rows[i][j]} bytes to rank {ranks[j]}, which expects "
        f"{rows[j][size + i]}"
        for i in range(size)
        for j in range(size)
        if rows[i][j] != rows[j][size + i]
    ]
    if wrong:
        raise MismatchError(f"all_to_all lists do not match: {'; '.join(wrong)}")


def _distribute(targets: Sequence[Tensor], counts: list[int], received: Tensor) -> None:
    for target, block in zip(targets, received.split(counts), strict=True):
        if block.storage_offset() % target.element_size():  # a view needs the dtype's alignment
            block = block.clone()
        target.detach().copy_(block.view(target.dtype).view(target.shape))


def _copied(data: Tensor) -> Tensor:
    return data.detach().clone(memory_format=torch.contiguous_format)

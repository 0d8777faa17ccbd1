"""What collectives ask of their arguments, checked on this rank before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..devices import entry_of_backend
from ..errors import InvalidArgumentError, NotInGroupError
from ..wire.backend import process_group, route
from ..world.info import group_ranks


def check_tensor(data: Any, call: str, name: str = "data") -> None:
    """Make sure that `data` is a dense tensor with memory.

    Raises:
        InvalidArgumentError: It is not.
    """
    if not isinstance(data, Tensor):
        message = f"{call} needs a tensor for {name}, got {type(data).__name__}"
        raise InvalidArgumentError(message)
    if data.layout is not torch.strided or data.is_quantized or data.is_meta:
        kind = "meta" if data.is_meta else "quantized" if data.is_quantized else str(data.layout)
        message = f"{call} needs a dense tensor for {name}, got a {kind} one: convert it first"
        raise InvalidArgumentError(message)


def check_target(data: Any, call: str, name: str = "data") -> None:
    """Make sure that `data` can be filled in place.

    Raises:
        InvalidArgumentError: It is no dense tensor, or an expanded one.
    """
    check_tensor(data, call, name)
    if data.is_contiguous():
        return
    if any(
        stride == 0 and size > 1 for stride, size in zip(data.stride(), data.shape, strict=True)
    ):
        message = (
            f"{call} fills {name} in place, but its entries share memory (shape "
            f"{tuple(data.shape)}, strides {data.stride()}): pass {name}.clone()"
        )
        raise InvalidArgumentError(message)


def check_list(
    tensors: Any,
    count: int,
    call: str,
    name: str,
    *,
    like: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Make sure that `tensors` are `count` dense tensors of one shape or dtype.

    Raises:
        InvalidArgumentError: They are not.
    """
    if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence) or len(tensors) != count:
        got = f"{len(tensors)}" if isinstance(tensors, Sequence) else type(tensors).__name__
        message = f"{call} needs a list of {count} tensors for {name}, one a rank, got {got}"
        raise InvalidArgumentError(message)
    for position, tensor in enumerate(tensors):
        label = f"{name}[{position}]" if count > 1 else name
        check_tensor(tensor, call, label)
        wanted = like.dtype if like is not None else dtype
        if wanted is not None and tensor.dtype != wanted:
            message = (
                f"{call} needs {wanted} for {label}, as the tensor beside it; got {tensor.dtype}"
            )
            raise InvalidArgumentError(message)
        if like is not None and tensor.shape != like.shape:
            message = (
                f"{call} needs shape {tuple(like.shape)} for {label}, as the tensor beside it; "
                f"got {tuple(tensor.shape)}"
            )
            raise InvalidArgumentError(message)


def check_form_with_list(
    args: Sequence[Any], options: Mapping[str, Any], names: tuple[str, str], call: str, needs: str
) -> None:
    """Make sure that a call which was not given one tensor was given a list and more.

    Raises:
        InvalidArgumentError: It was not.
    """
    first = args[0] if args else options.get("data")
    listed = names[0] in options or isinstance(first, Sequence)
    if not listed or not (len(args) > 1 or names[1] in options):
        raise InvalidArgumentError(f"{call} needs a tensor, or {needs}, got {type(first).__name__}")


def check_member(rank: Any, name: str, group: ProcessGroup | None) -> bool:
    """Make sure that global rank `rank` is in the group; tell whether it is this one.

    Raises:
        InvalidArgumentError: It is no whole number.
        NotInGroupError: It is outside.
    """
    if not isinstance(rank, int) or isinstance(rank, bool):
        message = f"{name} must be a global rank, got {rank!r}"
        raise InvalidArgumentError(message)
    ranks = group_ranks(group)
    if rank not in ranks:
        message = (
            f"{name}={rank} is not in the group, whose ranks are {', '.join(map(str, ranks))} "
            f"({name} is a global rank)"
        )
        raise NotInGroupError(message)
    members = process_group(group)
    return rank == (0 if members is None else ranks[members.rank()])


def check_tag(tag: Any, data: Tensor, group: ProcessGroup) -> None:
    """Make sure that messages can be told apart by `tag`.

    Args:
        tag: Of a message.
        data: What it carries.
        group: The group it goes by.

    Raises:
        InvalidArgumentError: It is no number of at least 0; or not 0, and the group's backend for
            tensors of this device has no tags.
    """
    if not isinstance(tag, int) or tag < 0:
        raise InvalidArgumentError(f"tag must be a number of at least 0, got {tag!r}")
    if tag:
        backend = route(data, group).backend
        entry = entry_of_backend(backend)
        if entry is not None and not entry.tags:
            raise InvalidArgumentError(
                f"tag={tag}: {backend} has no tags, it matches the messages between two ranks in "
                "the order of sending; leave tag=0 and receive in that order, or send each kind of "
                "message by a group of its own"
            )

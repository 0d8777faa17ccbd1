"""Collectives for whole models: dicts of tensors, lists of parameters, the random seed."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed import ProcessGroup

from .collectives.reduce import all_reduce
from .errors import InvalidArgumentError
from .wire.backend import Group, broadcast_ints
from .wire.checks import agree, begin, check_target, describe
from .wire.recipes import Op, op_name, recipe_for
from .world.info import group_ranks

SMALL = 1 << 20  # bytes; copying a larger tensor into a bucket costs more than sending it alone


def all_reduce_dict(data: Mapping[str, Tensor], op: Op = "sum", group: Group = None) -> None:
    """Reduce every tensor of a dict over the ranks, in place.

    Args:
        data: The same keys with the same shapes and dtypes on every rank, in any order.
        op: As in `all_reduce`; each tensor keeps its dtype.
        group: The default group by default.

    Raises:
        InvalidArgumentError: A key is not a string, a value is not a tensor, or the op is invalid.
        MismatchError: Keys, shapes or dtypes differ; raised on every rank, with the differences.
    """
    wrong = type(data).__name__
    if isinstance(data, Mapping):
        wrong = next((f"the key {key!r}" for key in data if not isinstance(key, str)), "")
    if wrong:
        message = f"all_reduce_dict needs a dict with strings for keys, got {wrong}"
        raise InvalidArgumentError(message)
    ordered = {key: data[key] for key in sorted(data)}
    for key, value in ordered.items():
        check_target(value, "all_reduce_dict", f"data[{key!r}]")
        recipe_for(op, value.dtype)
    members = begin(group, "all_reduce_dict", op_name(op))
    if members is None:
        return
    agree(
        "the dict of all_reduce_dict",
        [f"{key}: {describe('', value)[1:-1]}" for key, value in ordered.items()],
        members,
    )
    _reduce_all(list(ordered.values()), op, members, coalesce=True, limit=math.inf)


def all_reduce_params(
    params: Iterable[Tensor],
    coalesce: bool = True,
    bucket_size_mb: float = -1,
    op: Op = "sum",
    group: Group = None,
) -> None:
    """Reduce many tensors over the ranks, in place: gradients, buffers or parameters.

    Args:
        params: Iterable of tensors of any dtypes, in the same order on every rank; may contain
            leaves that require grad. A tensor that occurs twice is reduced once.
        coalesce: Send small tensors (under 1 MiB) together; larger ones are always sent alone.
        bucket_size_mb: Largest bucket in MiB; -1 for no limit.
        op: As in `all_reduce`.
        group: The default group by default.

    Raises:
        InvalidArgumentError: An item is not a tensor, or the op or bucket size is invalid.
    """
    if isinstance(params, (Tensor, Mapping)) or not isinstance(params, Iterable):
        message = f"all_reduce_params needs an iterable of tensors, got {type(params).__name__}"
        raise InvalidArgumentError(message)
    if not isinstance(bucket_size_mb, int | float) or not (
        bucket_size_mb == -1 or 0 < bucket_size_mb < float("inf")
    ):
        message = f"bucket_size_mb must be positive, or -1 for no limit, got {bucket_size_mb!r}"
        raise InvalidArgumentError(message)
    tensors = list(params)
    for position, tensor in enumerate(tensors):
        check_target(tensor, "all_reduce_params", f"params[{position}]")
    for dtype in {tensor.dtype for tensor in tensors}:
        recipe_for(op, dtype)
    members = begin(group, "all_reduce_params", tensors, op_name(op), coalesce, bucket_size_mb)
    if members is None:
        return
    limit = math.inf if bucket_size_mb == -1 else bucket_size_mb * 2**20
    _reduce_all(tensors, op, members, coalesce, limit)


def sync_random_seed(group: Group = None) -> int:
    """Return a fresh random seed below 2**31, the same on every rank.

    The first rank of the group draws it from the operating system; no generator changes.
    """
    seed = secrets.randbelow(2**31)
    members = begin(group, "sync_random_seed")
    if members is None:
        return seed
    return broadcast_ints([seed], group_ranks(members)[0], members)[0]


def _reduce_all(
    tensors: Iterable[Tensor], op: Op, members: ProcessGroup, coalesce: bool, limit: float
) -> None:
    """Reduce each tensor once, small ones in buckets; start all calls before waiting for any."""
    once = {id(tensor): tensor for tensor in tensors}.values()
    distinct = [tensor.detach() if tensor.requires_grad else tensor for tensor in once]
    large = [tensor for tensor in distinct if not coalesce or tensor.nbytes >= SMALL]
    small = [tensor for tensor in distinct if coalesce and tensor.nbytes < SMALL]
    works = [all_reduce(tensor, op, members, async_op=True) for tensor in large]
    devices = dict.fromkeys(tensor.device for tensor in small)
    alike = ([tensor for tensor in small if tensor.device == device] for device in devices)
    buckets = [bucket for each in alike for bucket in _take_tensors(each, limit)]  # one dtype each
    flats = [_flatten_dense_tensors(bucket) for bucket in buckets]
    works += [all_reduce(flat, op, members, async_op=True) for flat in flats]
    for work in works:
        work.wait()
    for bucket, flat in zip(buckets, flats, strict=True):
        torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(flat, bucket)))

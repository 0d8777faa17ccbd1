"""One call that shards any optimizer over the data-parallel ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ....dist.agreement import agree
from ....dist.errors import InvalidArgumentError, StateError
from ...pg_manager import describe_rank
from ..buckets.bucket import Bucket
from ..buckets.manager import BucketManager
from ..buckets.slot import Slot
from ..data_parallel import DataParallelBucket
from ..shards import Shard, parameter_shards
from .bucket import ShardedBucket
from .gather import Gathers

# They treat every element alike, so a parameter may be cut anywhere. Others get whole ones.
ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam",
                 "RMSprop", "Rprop", "SGD")
)  # fmt: skip
# They look at all parameters at once, or want sparse gradients.
REFUSED = frozenset(getattr(torch.optim, name) for name in ("LBFGS", "SparseAdam"))


def shard_optimizer(
    optimizer: Optimizer, model: DataParallelBucket, *, stage: int = 1, overlap: bool = False
) -> Optimizer:
    """Let each rank update its part of the parameters and keep the state of that part, in place.

    The optimizer's ``param_groups`` then hold this rank's shards: ranges of parameters, flat, or
    whole parameters for an optimizer that is not known to treat all elements alike. Those of
    16-bit parameters are float32 masters. Their ``grad`` is the sum over the ranks when a
    synchronised backward returns, and ``parameter.grad`` says only that there is one. Schedulers
    and gradient scalers work as ever; `parameter_shards` names the shards.

    Parameters that the optimizer does not have, and those that ``model.tied_parameters`` names
    (tied across pipeline stages), stay as they were: summed whole, and updated on every rank.

    Args:
        optimizer: Any of ``torch.optim``, or another that updates each parameter by itself.
        model: The wrapper of its parameters.
        stage: 1 shards the optimizer's state; 2 the gradients too: each backward sums them into
            the shards, also inside ``no_sync``, and none is kept whole.
        overlap: Whether updated parameters are fetched behind the next forward, each before the
            module that has it is called. Then read parameters after ``optimizer.step()`` by
            ``state_dict()`` only, or after ``model.wait_for_parameters()``.

    A further call lets another optimizer take over the shards.

    Returns:
        The optimizer.

    Raises:
        InvalidArgumentError: Another stage, or an optimizer that cannot be sharded.
        StateError: Gradients are under way, parameters share memory, or they were cut for another
            optimizer and this one needs them whole.
        MismatchError: The ranks' optimizers differ.

    Source: ZeRO, https://arxiv.org/abs/1910.02054.
    """
    _check(optimizer, model, stage)
    manager = model.bucket_manager
    whole = type(optimizer) not in ELEMENTWISE
    _agree(optimizer, manager, stage, overlap)
    if model.optimizer_shards is None:
        _shard(optimizer, model, whole=whole)
    buckets = [each for each in manager.buckets if isinstance(each, ShardedBucket)]
    if any(bucket.whole < whole for bucket in buckets):
        raise StateError(
            f"{describe_rank()}: this model's parameters were cut for another optimizer, and "
            f"{type(optimizer).__name__} needs them whole: wrap the model anew"
        )
    manager.eager = stage == 2
    for bucket in buckets:
        bucket.keeps_buffer = stage == 1
    _replace_parameters(optimizer, parameter_shards(model))
    model.overlap_gathers = overlap
    _follow(optimizer, model, buckets)
    return optimizer


def _shard(optimizer: Optimizer, model: DataParallelBucket, *, whole: bool) -> None:
    """Put the parameters that the optimizer has into sharded buckets."""
    manager = model.bucket_manager
    taken = {id(each) for group in optimizer.param_groups for each in group["params"]}
    tied = set(getattr(model, "tied_parameters", ()))
    slots = _in_order(manager)
    sharded = [s for s in slots if id(s.parameter) in taken and s.name not in tied]
    _refuse_shared_memory(model, sharded)
    buckets = [
        ShardedBucket(each.slots, each.dtype, manager.reduction, whole=whole)
        for each in manager.fill(sharded)
    ]
    kept = {slot.index for slot in sharded}
    rest = manager.fill(slot for slot in slots if slot.index not in kept)
    manager.use_settled([*buckets, *rest])
    model.use_shards(_all_shards(manager, buckets), Gathers(model.module, buckets))


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's parameters' whole gradients, gathered where they lie in shards.

    All ranks of the data-parallel group call it. Parameters without a gradient are left out.
    """
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for bucket in _buckets(model):
        if isinstance(bucket, ShardedBucket):
            found |= {slot.name: part for slot, part in bucket.whole_gradients()}
    return found


def _buckets(model: nn.Module) -> Iterable[Bucket]:
    manager = getattr(model, "bucket_manager", None)
    return manager.buckets if isinstance(manager, BucketManager) else ()


def _in_order(manager: BucketManager) -> list[Slot]:
    return [slot for bucket in manager.buckets for slot in bucket.slots]


def _check(optimizer: Optimizer, model: DataParallelBucket, stage: int) -> None:
    if not isinstance(model, DataParallelBucket):
        raise InvalidArgumentError(
            f"model must be a DataParallelBucket, got {type(model).__name__}: wrap the model first"
        )
    if stage not in (1, 2):
        raise InvalidArgumentError(
            f"stage must be 1 (optimizer state) or 2 (gradients too), got {stage!r}; for sharded "
            "parameters use fully_shard of torch over the data-parallel axis"
        )
    if type(optimizer) in REFUSED:
        raise InvalidArgumentError(
            f"{type(optimizer).__name__} cannot be sharded: it looks at all parameters at once, "
            "or at sparse gradients; take another optimizer"
        )
    if any(slot.local for slot in model.bucket_manager.slots):
        raise StateError(
            f"{describe_rank()}: gradients are accumulated that have not been synchronised; shard "
            "the optimizer before the first backward"
        )


def _agree(optimizer: Optimizer, manager: BucketManager, stage: int, overlap: bool) -> None:
    names = {id(slot.parameter): slot.name for slot in manager.slots}
    lines = [f"{type(optimizer).__name__}, stage={stage}, overlap={overlap}"]
    for at, group in enumerate(optimizer.param_groups):
        lines += [f"group {at} has {names.get(id(p), 'another')}" for p in group["params"]]
    agree("the optimizer to shard", lines, manager.reduction.group)


def _refuse_shared_memory(model: nn.Module, slots: Iterable[Slot]) -> None:
    """Refuse parameters that another tensor of the model is a view of: they are to be moved."""
    holders: dict[int, set[int]] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.numel():
            pointer = tensor.untyped_storage().data_ptr()
            holders.setdefault(pointer, set()).add(id(tensor))
    for slot in slots:
        data = slot.parameter
        if data.numel() and len(holders[data.untyped_storage().data_ptr()]) > 1:
            raise StateError(
                f"{describe_rank()}: {slot.name} shares memory with another tensor of the model, "
                "which would no longer follow it; make them one parameter, or separate ones"
            )


def _all_shards(manager: BucketManager, buckets: Iterable[ShardedBucket]) -> list[Shard]:
    found: dict[str, list[Shard]] = {}
    for bucket in buckets:
        for slot in bucket.slots:
            found[slot.name] = []
        for shard in bucket.shards:
            found[shard.name].append(shard)
    for slot in manager.slots:
        each = slot.parameter
        found.setdefault(slot.name, [Shard(slot.name, each, 0, each.numel(), each, True)])
    return [shard for slot in manager.slots for shard in found[slot.name]]


def _replace_parameters(optimizer: Optimizer, shards: Iterable[Shard]) -> None:
    """Put shards in the place of parameters, and the shards of their state in that of the state."""
    of: dict[int, list[Shard]] = {}
    for shard in shards:
        of.setdefault(id(shard.parameter), []).append(shard)
    for group in optimizer.param_groups:
        parameters = group["params"]
        group["params"] = [s.tensor for each in parameters for s in of.get(id(each), [])]
        group.pop("param_names", None)
        for each in parameters:
            state = optimizer.state.pop(each, None)
            for shard in of.get(id(each), []) if state else []:
                optimizer.state[shard.tensor] = {k: _cut(v, shard) for k, v in state.items()}


def _cut(value: Any, shard: Shard) -> Any:
    if not isinstance(value, Tensor) or value.shape != shard.parameter.shape:
        return value.clone() if isinstance(value, Tensor) else value
    return value.reshape(-1)[shard.start : shard.stop].view(shard.tensor.shape).clone()


def _follow(
    optimizer: Optimizer, model: DataParallelBucket, buckets: Iterable[ShardedBucket]
) -> None:
    """Let the optimizer's steps read and fetch parameters, and its zero_grad reach the model's."""
    this = weakref.ref(model)

    def before(*_: Any) -> None:
        model = this()
        if model is not None:
            model.wait_for_parameters()
            for bucket in buckets:
                bucket.read_parameters()

    def after(*_: Any) -> None:
        model = this()
        if model is not None:
            model.fetch_parameters()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    zero_grad = partial(_zero_grad, weakref.ref(optimizer), this)
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


def _zero_grad(
    optimizer: weakref.ref[Optimizer],
    model: weakref.ref[DataParallelBucket],
    set_to_none: bool = True,
) -> None:
    """Forget all gradients, those in shards and those on their way there."""
    this, wrapper = optimizer(), model()
    if this is not None:
        type(this).zero_grad(this, set_to_none)
    if wrapper is not None:
        wrapper.zero_grad(set_to_none)

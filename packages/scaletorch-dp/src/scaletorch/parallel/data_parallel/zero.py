"""ZeRO: one call shards any optimizer over the data-parallel ranks."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...dist.building import agree, caught
from ...dist.errors import InvalidArgumentError, StateError
from ..pg_manager import describe_rank
from ..pg_manager.building import Scope, known_elementwise, update_scope
from .buckets.bucket import Slot
from .buckets.manager import BucketManager
from .data_parallel import DataParallelBucket
from .sharding.gather import ParameterGather, hook_optimizer
from .sharding.shards import Shard, ShardedBucket, check_module, whole_parameter


def shard_optimizer(
    optimizer: Optimizer, model: DataParallelBucket, *, stage: int = 1, overlap: bool = False
) -> Optimizer:
    """Let each rank update its shards of the parameters and keep their state, in place.

    The optimizer's `param_groups` then hold this rank's shards: flat ranges of parameters, or whole
    parameters for an optimizer that is not known to be elementwise. Shards of 16-bit parameters are
    float32 masters. Their `grad` is the sum over the ranks when a synchronised backward returns,
    and `parameter.grad` is a placeholder. Schedulers work unchanged, gradient scalers if they agree
    over the ranks, as this package's `GradScaler` does; `parameter_shards` names the shards.

    Parameters that the optimizer does not have, and those in `model.tied_parameters` (tied across
    pipeline stages), stay as they were: summed whole, and updated on every rank.

    Args:
        optimizer: Any that updates parameters independently, as a trial on small matrices tests.
        model: The wrapper of its parameters.
        stage: 1 shards the optimizer's state; 2 the gradients too: each backward sums them into
            the shards, also inside `no_sync`, and none is kept whole.
        overlap: Whether updated parameters are gathered during the next forward, each before the
            forward of its module. Then read parameters after `optimizer.step()` only by
            `state_dict()`, or after `model.wait_for_parameters()`.

    A further call lets another optimizer take over the shards.

    Returns:
        The optimizer.

    Raises:
        InvalidArgumentError: Another stage, or an optimizer that cannot be sharded or has none of
            the model's parameters.
        StateError: Gradients are in flight, parameters share memory, or they were sharded for
            another optimizer and this one needs them whole.
        MismatchError: The ranks' optimizers differ.

    Source: ZeRO, https://arxiv.org/abs/1910.02054.
    """
    if not isinstance(model, DataParallelBucket):
        raise InvalidArgumentError(
            f"model must be a DataParallelBucket, got {type(model).__name__}: wrap the model first"
        )
    error = caught(_check, optimizer, model, stage)
    for manager in model.bucket_managers:
        _agree(optimizer, manager, stage, overlap, error)
    for manager in model.bucket_managers:
        _shard_rest(optimizer, model, manager)
        manager.eager = manager.eager or stage == 2
    buckets = _buckets_of(optimizer, model)
    for bucket in buckets:
        bucket.keeps_buffer = stage == 1
    shards = _all_shards(model)
    gather = ParameterGather(model.module, buckets)
    model.use_shards(shards, gather)
    _replace_parameters(optimizer, shards, {id(slot.parameter) for slot in _slots(model)})
    hook_optimizer(optimizer, gather, weakref.ref(model), overlap=overlap)
    return optimizer


def _shard_rest(optimizer: Optimizer, model: DataParallelBucket, manager: BucketManager) -> None:
    """Put the optimizer's parameters that are not sharded yet into sharded buckets."""
    whole = not known_elementwise(optimizer)
    sharded = [b for b in manager.buckets if isinstance(b, ShardedBucket)]
    sharded += [
        ShardedBucket(bucket.slots, bucket.dtype, manager.reduction, whole=whole)
        for bucket in manager.fill(_slots_to_shard(optimizer, model, manager))
    ]
    settled = {slot.index for bucket in sharded for slot in bucket.slots}
    ordered = (slot for bucket in manager.buckets for slot in bucket.slots)
    rest = manager.fill(slot for slot in ordered if slot.index not in settled)
    manager.use_buckets([*sharded, *rest])
    manager.order = None  # shards belong to ranks: the first backward does not fill buckets anew


def _slots_to_shard(
    optimizer: Optimizer, model: DataParallelBucket, manager: BucketManager
) -> list[Slot]:
    taken = _parameters_of(optimizer)
    tied = set(getattr(model, "tied_parameters", ()))
    return [
        slot
        for bucket in manager.buckets
        if not isinstance(bucket, ShardedBucket)
        for slot in bucket.slots
        if id(slot.parameter) in taken and slot.name not in tied
    ]


def _buckets_of(optimizer: Optimizer, model: DataParallelBucket) -> list[ShardedBucket]:
    taken = _parameters_of(optimizer)
    return [b for b in _sharded(model) if any(id(slot.parameter) in taken for slot in b.slots)]


def _parameters_of(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def whole_gradients(model: nn.Module, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return the whole gradients of this rank's parameters, gathered if they lie in shards.

    All ranks of the data-parallel group call it. Parameters without a gradient are left out.

    Args:
        model: The result of `DataParallelBucket` or `shard_optimizer`.
        names: Names of parameters, the same on all ranks: only the buckets that hold them are
            gathered. None takes all.
    """
    check_module(model)
    if isinstance(model, DataParallelBucket):
        model.settle_gradients()
    parameters = dict(model.named_parameters())
    wanted = parameters.keys() if names is None else {*names}
    found = {n: p.grad for n, p in parameters.items() if n in wanted and p.grad is not None}
    for bucket in _sharded(model):
        if any(slot.name in wanted for slot in bucket.slots):
            whole = bucket.whole_gradients()
            found |= {slot.name: grad for slot, grad in whole if slot.name in wanted}
    return found


def _sharded(model: nn.Module) -> list[ShardedBucket]:
    managers: list[BucketManager] = getattr(model, "bucket_managers", [])
    buckets = (bucket for manager in managers for bucket in manager.buckets)
    return [bucket for bucket in buckets if isinstance(bucket, ShardedBucket)]


def _slots(model: DataParallelBucket) -> list[Slot]:
    return [slot for manager in model.bucket_managers for slot in manager.slots]


def _check(optimizer: Optimizer, model: DataParallelBucket, stage: int) -> None:
    if stage not in (1, 2):
        raise InvalidArgumentError(
            f"stage must be 1 (optimizer state) or 2 (gradients too), got {stage!r}; for sharded "
            "parameters use fully_shard of torch over the data-parallel axis"
        )
    scope = update_scope(optimizer)
    if scope > Scope.PARAMETER:
        raise InvalidArgumentError(
            f"{type(optimizer).__name__} cannot be sharded: it {scope.words}; each rank would "
            "update some parameters without the others: take another optimizer"
        )
    known = {id(slot.parameter) for slot in _slots(model)}
    known |= {id(shard.tensor) for shard in model.optimizer_shards or ()}
    if not _parameters_of(optimizer) & known:
        raise InvalidArgumentError(
            "the optimizer has none of the model's parameters that require grad: build it from "
            "model.parameters()"
        )
    shards = {id(shard.tensor) for shard in model.optimizer_shards or () if not shard.replicated}
    if shards & _parameters_of(optimizer):
        raise StateError("this optimizer is sharded already")
    if any(slot.local for slot in _slots(model)):
        raise StateError(
            f"{describe_rank()}: gradients are accumulated that have not been synchronised; shard "
            "the optimizer before the first backward"
        )
    whole = not known_elementwise(optimizer)
    if any(bucket.whole < whole for bucket in _buckets_of(optimizer, model)):
        raise StateError(
            f"{describe_rank()}: parameters were divided between ranks for another optimizer, and "
            f"{type(optimizer).__name__} needs whole ones: wrap the model again"
        )
    for manager in model.bucket_managers:
        _refuse_shared_memory(model, _slots_to_shard(optimizer, model, manager))


def _agree(
    optimizer: Optimizer, manager: BucketManager, stage: int, overlap: bool, error: Exception | None
) -> None:
    names = {id(slot.parameter): slot.name for slot in manager.slots}
    lines = [f"{type(optimizer).__name__}, stage={stage}, overlap={overlap}"]
    for at, group in enumerate(optimizer.param_groups):
        # Ranks may differ in the parameters of other groups of ranks.
        lines += [f"group {at} has {names[id(p)]}" for p in group["params"] if id(p) in names]
    agree("the optimizer to shard", lines, manager.reduction.group, error=error)


def _refuse_shared_memory(model: nn.Module, slots: Iterable[Slot]) -> None:
    """Refuse parameters that share memory with another tensor of the model: they will be moved."""
    moved = {id(slot.parameter): slot.name for slot in slots}
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()] if t.numel()}
    dense = {k: t for k, t in tensors.items() if t.layout is torch.strided and not t.is_meta}
    end, last = 0, ""
    for start, stop, name in sorted((*_memory(t), moved.get(k, "")) for k, t in dense.items()):
        if start < end and (name or last):
            raise StateError(
                f"{describe_rank()}: {name or last} shares memory with another tensor of the "
                "model, which would no longer follow it; make them one parameter, or separate ones"
            )
        if stop > end:
            end, last = stop, name


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return the start and end address of a tensor's memory."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _all_shards(model: DataParallelBucket) -> list[Shard]:
    """Return what this rank updates: its shards, and parameters that are not sharded."""
    buckets = _sharded(model)
    divided = {id(slot.parameter) for bucket in buckets for slot in bucket.slots}
    own = {id(shard.parameter): shard for bucket in buckets for shard in bucket.shards}
    own |= {
        id(slot.parameter): whole_parameter(slot.name, slot.parameter)
        for slot in _slots(model)
        if id(slot.parameter) not in divided
    }
    return [own[id(slot.parameter)] for slot in _slots(model) if id(slot.parameter) in own]


def _replace_parameters(optimizer: Optimizer, shards: Iterable[Shard], known: set[int]) -> None:
    """Replace parameters by shards, and their state by shards of the state."""
    own = {id(shard.parameter): shard for shard in shards}
    for group in optimizer.param_groups:
        replaced = []
        for parameter in group["params"]:
            if id(parameter) not in known:  # another model's
                replaced.append(parameter)
                continue
            state, shard = optimizer.state.pop(parameter, None), own.get(id(parameter))
            if shard is not None:
                replaced.append(shard.tensor)
                if shard.tensor is not parameter:
                    shard.tensor.stands_for = parameter  # type: ignore[attr-defined]  # for checks
                if state:
                    optimizer.state[shard.tensor] = {k: _cut(v, shard) for k, v in state.items()}
        group["params"] = replaced
        group.pop("param_names", None)


def _cut(value: Any, shard: Shard) -> Any:
    if not isinstance(value, Tensor) or value.shape != shard.parameter.shape:
        return value.clone() if isinstance(value, Tensor) else value
    return value.reshape(-1)[shard.start : shard.stop].view(shard.tensor.shape).clone()

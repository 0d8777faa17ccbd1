"""An optimizer's state by parameter names, for any optimizer and any sharding of its state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...dist.errors import InvalidArgumentError
from ...parallel.data_parallel import Shard
from ..agreement import CheckpointError
from ..format.metadata import SavedTensor, decode, encode
from .model_tensors import ModelTensor, Rectangle
from .record import Entry, Record

T = TypeVar("T")
# Settings of how an optimizer computes; they stay those of the running program.
KNOBS = {
    "params", "param_names", "foreach", "fused", "capturable", "differentiable",
    "decoupled_weight_decay",
}  # fmt: skip


def encode_groups(optimizer: torch.optim.Optimizer) -> Any:
    """Return the hyperparameters of an optimizer's groups as JSON."""
    groups = [{k: v for k, v in g.items() if k not in KNOBS} for g in optimizer.param_groups]
    return [encode(group, f"the optimizer's group {at}") for at, group in enumerate(groups)]


def record_shard(
    record: Record, shard: Shard, held: ModelTensor, state: Mapping[str, Any], *, writes: bool
) -> None:
    """Add the optimizer's state of one shard to a record, and the shard itself if a master."""
    if not shard.tensor.numel():
        return
    replicas = held.replicas if shard.replicated else ""

    def add(name: str, value: Tensor) -> None:
        found = [*held.rectangles(value, shard.start, shard.stop)]
        record.add(name, Entry(held.shape, value.dtype, found, replicas=replicas))

    if shard.is_master and shard.tensor is not held.tensor:  # a matrix's masters are its shards
        add(f"master.{held.name}", shard.tensor)
    for key, value in state.items():
        name = f"optimizer.{held.name}.{key}"
        if "." in key:
            raise InvalidArgumentError(f"a key of optimizer state must not have a dot: {name}")
        zero_dims = isinstance(value, Tensor) and value.ndim == 0
        if not isinstance(value, Tensor) or (zero_dims and (shard.tensor.ndim or key == "step")):
            if writes:
                record.scalars[name] = encode(value, f"{name}, the optimizer's state,")
        elif value.shape == shard.tensor.shape:
            add(name, value)
        elif is_whole(shard, held):
            whole = [Rectangle((0,) * value.ndim, value.detach(), held.owner)] * bool(value.numel())
            record.add(name, Entry(tuple(value.shape), value.dtype, whole, replicas=replicas))
        else:
            raise InvalidArgumentError(
                f"{name} has shape {tuple(value.shape)} and its parameter "
                f"{tuple(shard.tensor.shape)}: state of another shape can be saved only if the "
                "parameter is whole on every rank, and this one is sharded"
            )


def is_whole(shard: Shard, held: ModelTensor) -> bool:
    """Return whether the shard is a whole parameter of the plain model, in the same shape."""
    return held.cut is None and tuple(shard.tensor.shape) == held.shape


def make_states(
    optimizer: torch.optim.Optimizer,
    shards: Iterable[tuple[Shard, ModelTensor]],
    saved: Mapping[str, SavedTensor],
    scalars: Mapping[str, Any],
    targets: dict[str, Entry],
) -> list[tuple[Tensor, dict[str, Any]]]:
    """Return each tensor of an optimizer with new state, to be filled by loading `targets`.

    State that was saved in its tensor's dtype gets the dtype of the tensor on this rank. Memory of
    the current state is reused if it fits.
    """
    tensors, numbers = _by_parameter(saved), _by_parameter(scalars)
    groups = {id(t): group for group in optimizer.param_groups for t in group["params"]}
    states = []
    for shard, held in shards:
        group = groups.get(id(shard.tensor))
        if group is None or not shard.tensor.numel():
            continue
        state: dict[str, Any] = {}
        moves_step = group.get("capturable") or group.get("fused")  # as torch's optimizers expect
        for key, number in numbers.get(held.name, {}).items():
            state[key] = decode(number)
            if isinstance(state[key], Tensor) and (moves_step or key != "step"):
                state[key] = state[key].to(shard.tensor.device)
        of_parameter = saved.get(f"master.{held.name}", saved[f"model.{held.name}"])
        for key, entry in tensors.get(held.name, {}).items():
            name = f"optimizer.{held.name}.{key}"
            target = Entry(entry.shape, entry.dtype, [], name)
            if entry.shape == held.shape:
                dtype = shard.tensor.dtype if entry.dtype == of_parameter.dtype else entry.dtype
                value = torch.empty_like(shard.tensor, dtype=dtype, requires_grad=False)
                current = optimizer.state.get(shard.tensor, {}).get(key)
                if isinstance(current, Tensor) and _layout(current) == _layout(value):
                    value = current
                found = held.rectangles(value, shard.start, shard.stop)
                targets.setdefault(name, target).rectangles.extend(found)
            elif is_whole(shard, held):
                value = torch.empty(entry.shape, dtype=entry.dtype, device=shard.tensor.device)
                if value.numel():
                    target.rectangles.append(Rectangle((0,) * value.ndim, value, 0))
                targets[name] = target
            else:
                raise CheckpointError(
                    f"{name} was saved with shape {entry.shape} and its parameter with "
                    f"{held.shape}: it can be loaded only if the parameter is whole on the rank, "
                    "and here it is sharded"
                )
            state[key] = value
        states.append((shard.tensor, state))
    return states


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def _by_parameter(saved: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Return a mapping: parameter name -> key -> saved optimizer state."""
    found: dict[str, dict[str, T]] = {}
    for entry, value in saved.items():
        if entry.startswith("optimizer."):
            name, _, key = entry.removeprefix("optimizer.").rpartition(".")
            found.setdefault(name, {})[key] = value
    return found

"""An optimizer's state by parameter names, for any optimizer and any sharding of its state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...dist.errors import InvalidArgumentError
from ...parallel.data_parallel import Shard
from ..agreement import CheckpointError
from ..format.metadata import Saved
from ..format.values import decode, encode
from .model_tensors import Held, Part
from .record import Entry, Record

T = TypeVar("T")
# Settings of how an optimizer computes; they stay those of the running program.
KNOBS = {
    "params", "param_names", "foreach", "fused", "capturable", "differentiable",
    "decoupled_weight_decay",
}  # fmt: skip


def encode_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the hyperparameters of an optimizer's groups as JSON."""
    return [
        {
            key: encode(value, f"{key} of the optimizer's group {number}")
            for key, value in group.items()
            if key not in KNOBS
        }
        for number, group in enumerate(optimizer.param_groups)
    ]


def record_shard(
    record: Record, shard: Shard, held: Held, state: Mapping[str, Any], *, writes: bool
) -> None:
    """Add the optimizer's state of one shard to a record, and the shard itself if a master."""
    if not shard.tensor.numel():
        return
    if shard.is_master and shard.tensor is not held.tensor:  # a matrix's masters are its shards
        _record_range(record, f"master.{held.name}", shard, held, shard.tensor)
    for key, value in state.items():
        name = f"optimizer.{held.name}.{key}"
        if "." in key:
            raise InvalidArgumentError(f"a checkpoint takes no state with a dot in its key: {name}")
        if not isinstance(value, Tensor) or _is_number(key, value, shard):
            if writes:
                record.scalars[name] = encode(value, f"{name}, the optimizer's state,")
        elif value.shape == shard.tensor.shape:
            _record_range(record, name, shard, held, value)
        elif is_whole(shard, held):
            whole = Part((0,) * value.ndim, value.detach(), held.owner)
            entry = Entry(tuple(value.shape), value.dtype, [whole] if value.numel() else [])
            _record(record, name, shard, held, entry)
        else:
            raise InvalidArgumentError(
                f"{name} has shape {tuple(value.shape)}, unlike its parameter's "
                f"{tuple(shard.tensor.shape)}: such state can be saved of parameters that are "
                "whole on every rank, and this one is divided over ranks"
            )


def _record_range(record: Record, name: str, shard: Shard, held: Held, value: Tensor) -> None:
    parts = [*held.parts(value, shard.start, shard.stop)]
    _record(record, name, shard, held, Entry(held.shape, value.dtype, parts))


def _record(record: Record, name: str, shard: Shard, held: Held, entry: Entry) -> None:
    experts = held.experts is not None
    record.add(name, entry, replicated=shard.replicated, experts=experts)


def _is_number(key: str, value: Tensor, shard: Shard) -> bool:
    return value.ndim == 0 and (shard.tensor.ndim > 0 or key == "step")


def is_whole(shard: Shard, held: Held) -> bool:
    """Return whether the shard is a whole parameter of the plain model, in the same shape."""
    return held.cut is None and tuple(shard.tensor.shape) == held.shape


def make_states(
    optimizer: torch.optim.Optimizer,
    shards: Iterable[tuple[Shard, Held]],
    saved: Mapping[str, Saved],
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
        state = {
            key: _place_number(key, decode(value), shard.tensor, group)
            for key, value in numbers.get(held.name, {}).items()
        }
        of_parameter = saved.get(f"master.{held.name}", saved[f"model.{held.name}"])
        current = optimizer.state.get(shard.tensor, {})
        for key, entry in tensors.get(held.name, {}).items():
            name = f"optimizer.{held.name}.{key}"
            target = Entry(entry.shape, entry.dtype, [], name)
            if entry.shape == held.shape:
                dtype = shard.tensor.dtype if entry.dtype == of_parameter.dtype else entry.dtype
                value = _memory(current.get(key), shard.tensor, dtype)
                parts = held.parts(value, shard.start, shard.stop)
                targets.setdefault(name, target).parts.extend(parts)
            elif is_whole(shard, held):
                value = torch.empty(entry.shape, dtype=entry.dtype, device=shard.tensor.device)
                target.parts.extend([Part((0,) * value.ndim, value, 0)] if value.numel() else [])
                targets[name] = target
            else:
                raise CheckpointError(
                    f"{name} was saved with shape {entry.shape}, unlike its parameter's "
                    f"{held.shape}: it can be loaded where the parameter is whole on the rank, and "
                    "here it is divided"
                )
            state[key] = value
        states.append((shard.tensor, state))
    return states


def _by_parameter(saved: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Return a mapping: parameter name -> key -> saved optimizer state."""
    found: dict[str, dict[str, T]] = {}
    for entry, value in saved.items():
        if entry.startswith("optimizer."):
            name, _, key = entry.removeprefix("optimizer.").rpartition(".")
            found.setdefault(name, {})[key] = value
    return found


def _memory(current: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory of a tensor's shape in a dtype: `current` if it fits, else new memory."""
    if isinstance(current, Tensor) and current.is_contiguous() and tensor.is_contiguous():
        found = current.shape, current.dtype, current.device
        if found == (tensor.shape, dtype, tensor.device):
            return current
    return torch.empty_like(tensor, dtype=dtype, requires_grad=False)


def _place_number(key: str, value: Any, tensor: Tensor, group: Mapping[str, Any]) -> Any:
    if isinstance(value, Tensor) and key == "step":  # the device that torch's optimizers expect
        return value.to(tensor.device) if group.get("capturable") or group.get("fused") else value
    return value.to(tensor.device) if isinstance(value, Tensor) else value

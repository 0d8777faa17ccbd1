"""An optimizer's state by parameters' names, whatever it keeps and whichever ranges are here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...dist.errors import InvalidArgumentError
from ...parallel.data_parallel import Shard
from ..format.metadata import Saved
from ..format.values import decode, encode, like
from ..together import CheckpointError
from .entries import Entry, Record
from .held import Held, Part

# How an optimizer computes is the running program's to say.
KNOBS = {
    "params", "param_names", "foreach", "fused", "capturable", "differentiable",
    "decoupled_weight_decay",
}  # fmt: skip


def encode_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the hyperparameters of an optimizer's groups as JSON.

    Raises:
        InvalidArgumentError: One is nothing that a checkpoint holds.
    """
    return [
        {
            key: encode(value, f"{key} of the optimizer's group {number}")
            for key, value in group.items()
            if key not in KNOBS
        }
        for number, group in enumerate(optimizer.param_groups)
    ]


def decode_groups(
    optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the hyperparameters of an optimizer's groups, as the optimizer has its own."""
    return [
        {key: like(group.get(key), decode(value)) for key, value in values.items()}
        for group, values in zip(optimizer.param_groups, saved, strict=True)
    ]


def restore_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Set the hyperparameters of an optimizer's groups."""
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.update(values)


def record_shard(
    record: Record, shard: Shard, held: Held, state: Mapping[str, Any], *, writes: bool
) -> None:
    """Add what the optimizer keeps of one shard, and the shard itself if it is a master.

    Raises:
        InvalidArgumentError: A state that is neither like the shard, nor one number, nor of a
            parameter that is whole on this rank.
    """
    if not shard.tensor.numel():  # there is nothing to keep
        return
    if shard.is_master and shard.tensor is not held.tensor:  # a whole matrix's are in its shards
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
    """Return whether the shard is a whole parameter of the plain model, in its shape."""
    return held.dim is None and tuple(shard.tensor.shape) == held.shape


@dataclass(slots=True)
class SavedState:
    """A checkpoint's optimizer state, sorted by parameters.

    Attributes:
        tensors: Name of a parameter -> key -> (shape, dtype) of what was saved.
        numbers: Name of a parameter -> key -> number, as JSON.
    """

    tensors: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)


def sort_saved(saved: Mapping[str, Saved], scalars: Mapping[str, Any]) -> SavedState:
    """Sort saved tensors and numbers by parameters."""
    state = SavedState()
    for entry, found in saved.items():
        if entry.startswith("optimizer."):
            name, _, key = entry.removeprefix("optimizer.").rpartition(".")
            state.tensors.setdefault(name, {})[key] = found.shape, found.dtype
    for entry, value in scalars.items():
        name, _, key = entry.removeprefix("optimizer.").rpartition(".")
        state.numbers.setdefault(name, {})[key] = value
    return state


def make_state(
    shard: Shard,
    held: Held,
    saved: SavedState,
    saved_dtype: torch.dtype,
    targets: dict[str, Entry],
    group: Mapping[str, Any],
    current: Mapping[str, Any],
) -> dict[str, Any]:
    """Return new state for a shard, whose tensors are still to be filled by loading `targets`.

    State that had its tensor's dtype when saved gets the dtype of the tensor here. Memory of the
    state that is there already is used again if it fits.

    Args:
        shard: What the optimizer has.
        held: The parameter of which it is a range.
        saved: What was saved.
        saved_dtype: Dtype of what the saving optimizer updated.
        targets: Entries to load; what this state needs is added.
        group: The optimizer's group that has the shard.
        current: The state that it has now.

    Raises:
        CheckpointError: State that only a parameter that is whole on its rank can have.
    """
    state: dict[str, Any] = {}
    for key, value in saved.numbers.get(held.name, {}).items():
        state[key] = _place_number(key, decode(value), shard.tensor, group)
    for key, (shape, dtype) in saved.tensors.get(held.name, {}).items():
        name = f"optimizer.{held.name}.{key}"
        if shape == held.shape:
            made = dtype if dtype != saved_dtype else shard.tensor.dtype
            value = _memory(current.get(key), shard.tensor, made)
            parts = held.parts(value, shard.start, shard.stop)
            targets.setdefault(name, Entry(shape, dtype, [], name)).parts.extend(parts)
        elif is_whole(shard, held):
            value = torch.empty(shape, dtype=dtype, device=shard.tensor.device)
            parts = iter([Part((0,) * len(shape), value, 0)] if value.numel() else [])
            targets[name] = Entry(shape, dtype, list(parts), name)
        else:
            raise CheckpointError(
                f"{name} was saved with shape {shape}, unlike its parameter's {held.shape}: it can "
                "be loaded where the parameter is whole on the rank, and here it is divided"
            )
        state[key] = value
    return state


def _memory(current: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory like a tensor's, in another dtype."""
    if isinstance(current, Tensor) and current.is_contiguous() and tensor.is_contiguous():
        found = current.shape, current.dtype, current.device
        if found == (tensor.shape, dtype, tensor.device):
            return current
    return torch.empty_like(tensor, dtype=dtype, requires_grad=False)


def _place_number(key: str, value: Any, tensor: Tensor, group: Mapping[str, Any]) -> Any:
    if isinstance(value, Tensor) and key == "step":  # as torch's own optimizers have it
        return value.to(tensor.device) if group.get("capturable") or group.get("fused") else value
    return value.to(tensor.device) if isinstance(value, Tensor) else value

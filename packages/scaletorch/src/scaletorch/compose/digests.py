"""Digests of this rank's tensors, and their comparison with those of other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..dist import all_gather_object
from ..parallel.data_parallel.building import ShardedGradient
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.pg_manager.building import digest
from ..parallel.tensor_parallel import split_by_owner
from .experts import expert_names

Sides = list[list[int]]  # ranks that have one digest, the largest side first
ABSENT = 1  # stands for a gradient that is None


class Key(NamedTuple):
    """Names the tensor of a digest; ranks that have the same key hold the same bits.

    Attributes:
        kind: "parameter", "gradient", "buffer", "optimizer" or "value".
        name: The tensor's in the plain model, or the value's.
        place: Which shard of it: its number and its first tp rank, of experts the ep rank too; or
            the pipeline's stage.
    """

    kind: str
    name: str
    place: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return kind and name."""
        return self.kind if self.kind == self.name else f"{self.kind} {self.name}"


def as_numbers(digests: Iterable[Tensor | int]) -> list[int]:
    """Return digests that lie on devices as numbers, fetched at once."""
    digests = list(digests)
    there = [each for each in digests if isinstance(each, Tensor)]
    stacked = torch.stack([each.to(there[0].device) for each in there]).tolist() if there else []
    fetched = iter(stacked)
    return [next(fetched) if isinstance(each, Tensor) else each for each in digests]


def keyed_pieces(
    model: nn.Module, tensors: Mapping[str, Tensor], manager: ProcessGroupManager
) -> Iterator[tuple[str, Key, Tensor]]:
    """Yield views of parameters, or of their gradients, with name and key of their replicas.

    Args:
        model: What `parallelize` returned.
        tensors: By the names of this rank's parameters.
        manager: The grid.
    """
    names = {name: tie.names[0] for tie in getattr(model, "ties", ()) for name in tie.names}
    experts = dict.fromkeys(expert_names(model), (manager.ep_rank,))
    for name, pieces in split_by_owner(model, tensors).items():
        for number, (owner, piece) in enumerate(pieces):
            place = number, owner, *experts.get(name, ())
            yield name, Key("parameter", names.get(name, name), place), piece


def parted_sides(
    digests: Sequence[tuple[Key, Tensor | int]], manager: ProcessGroupManager
) -> dict[Key, Sides]:
    """Return the keys whose digests differ, each with the ranks that have one; all ranks call it.

    Args:
        digests: This rank's numbers, by keys.
        manager: The grid.
    """
    keys = {text_hash(repr(key)): key for key, _ in digests}
    own = dict(zip(keys, as_numbers([number for _, number in digests]), strict=True))
    told = all_gather_object(own, manager.world_group)
    found: dict[int, set[int]] = {}
    for theirs in told:
        for name, number in theirs.items():
            found.setdefault(name, set()).add(number)
    parted = [name for name, numbers in found.items() if len(numbers) > 1]
    if not parted:
        return {}
    everyone = all_gather_object(keys, manager.world_group)
    named = {name: key for each in everyone for name, key in each.items()}
    return {named[name]: _sides_of([theirs.get(name) for theirs in told]) for name in parted}


def _sides_of(numbers: Sequence[int | None]) -> Sides:
    """Return the ranks that have each number; None is one that has none."""
    ranks: dict[int, list[int]] = {}
    for rank, number in enumerate(numbers):
        if number is not None:
            ranks.setdefault(number, []).append(rank)
    return sorted(ranks.values(), key=len, reverse=True)


def text_hash(text: str) -> int:
    """Return a number for a text."""
    content = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(content, "little", signed=True)


def tensor_digests(
    model: nn.Module, manager: ProcessGroupManager
) -> Iterator[tuple[Key, Tensor | int]]:
    """Yield digests of a parallelized model's parameters, gradients and buffers on this rank.

    A gradient that lies in shards is nobody else's, and counts as one that is None.
    """
    values = {name: each.detach() for name, each in model.named_parameters()}
    gradients = {
        name: each.grad
        for name, each in model.named_parameters()
        if isinstance(each.grad, Tensor) and not isinstance(each.grad, ShardedGradient)
    }
    there = {key: piece for _, key, piece in keyed_pieces(model, gradients, manager)}
    for _, key, piece in keyed_pieces(model, values, manager):
        yield key, digest(piece)
        yield key._replace(kind="gradient"), digest(there[key]) if key in there else ABSENT
    place = manager.pp_rank, manager.tp_rank, manager.ep_rank
    for name, buffer in _saved_buffers(model):
        yield Key("buffer", name, place), digest(buffer)


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a checkpoint has; others are caches, of this rank's own batches."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer


def nonfinite_parameters(model: nn.Module) -> list[str]:
    """Return the names of this rank's parameters that are not all finite."""
    held = [(n, p.detach()) for n, p in model.named_parameters() if p.numel()]
    if not held:
        return []
    # A sum costs one pass; it may overflow of itself, so a suspect is looked at again.
    sums = torch.stack([p.sum().isfinite().cpu() for _, p in held]).tolist()
    suspects = [pair for pair, fine in zip(held, sums, strict=True) if not fine]
    return [name for name, p in suspects if not p.isfinite().all()]


def optimizer_lines(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the numbers that an optimizer steps by, a line for each group."""
    return [
        ", ".join(
            f"{key}={shown}"
            for key, value in group.items()
            if key != "params" and (shown := _shown(value))  # a rank may have none of a group
        )
        for group in optimizer.param_groups
    ]


def _shown(value: Any) -> str:
    """Return a number, or several, as text; "" for anything else."""
    if isinstance(value, Tensor):
        return repr(value.tolist()) if value.numel() == 1 else ""
    if isinstance(value, tuple | list):
        shown = [_shown(each) for each in value]
        return f"({', '.join(shown)})" if all(shown) else ""
    return repr(value) if isinstance(value, int | float | str | None) else ""


def value_lines(values: Mapping[str, Any]) -> dict[str, str]:
    """Return further values as text, a tensor by its shape and digest."""
    return {
        name: f"{tuple(each.shape)} {each.dtype} {int(digest(each))}"
        if isinstance(each, Tensor)
        else repr(each)
        for name, each in values.items()
    }

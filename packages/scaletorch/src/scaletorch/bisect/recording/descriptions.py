"""Descriptions of a rank's shard of the batch and the model: by its program, or of a grid."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ...compose.batches import MicroBatch, rows_of_ranks
from ...compose.entries import row_count
from ...compose.forward import pipeline_of, terms_of
from ...dist.errors import InvalidArgumentError
from ...parallel.data_parallel import DataParallelBucket
from ...parallel.expert_parallel.building import find_expert_cuts
from ...parallel.pg_manager import ProcessGroupManager
from ...parallel.pipeline_parallel import PipelineParallel
from ...parallel.pipeline_parallel.building import PassThrough
from ...parallel.placement import share_cut
from ...parallel.tensor_parallel.building import ParameterCut, find_cuts, summed_outside

Ranges = list[tuple[int, int]]  # index ranges [start, stop), in the order of the shard's indices
Place = list[Any]  # per dim None, or [whole size, *ranges]


@dataclass(frozen=True, slots=True)
class Axis:
    """A length that is divided over ranks: rows of the batch, positions, columns of a layer.

    Attributes:
        total: The whole length.
        shards: A rank's indices in each micro-batch; one entry if these are the same.
    """

    total: int
    shards: list[Ranges]


@dataclass(slots=True)
class Description:
    """A description of one rank's shards.

    Attributes:
        axes: By name: 'rows', 'positions', and others.
        groups: Groups of ranks of each axis of the grid, for messages: 'tp' -> [[0, 1], [2, 3]].
        micro_batches: Number of micro-batches in a step.
        weight: Weight of this rank's loss in the global loss, by which its gradients of activations
            are multiplied: 1/2 for the mean of two ranks' means. None if it is to be inferred.
        places: Places of sharded parameters, by name; other parameters are whole.
        shared: Axes along which several ranks hold the same shard, each with a term of its
            gradient.
        unseen: (module, 'in' or 'out', chunk) whose tensors do not exist in the full model.
        chunk: Returns the index of the rank's pipeline stage that is running.
        terms: Modules whose input gradients on this rank have to be added up over ranks.
    """

    axes: dict[str, Axis] = field(default_factory=dict)
    groups: dict[str, list[list[int]]] = field(default_factory=dict)
    micro_batches: int = 1
    weight: float | None = 1.0
    places: dict[str, Place] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)
    unseen: set[tuple[str, str, int]] = field(default_factory=set)
    chunk: Callable[[], int] = int
    terms: set[str] = field(default_factory=set)


def as_ranges(indices: Iterable[int]) -> Ranges:
    """Return indices as ranges of consecutive ones, in their order."""
    found: Ranges = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return found


def description_of(given: Mapping[str, Any] | Description | None) -> Description:
    """Return a `Description` from what a program passes as `describe`, see `record`."""
    if isinstance(given, Description):
        return given
    found = Description(weight=None)
    for name, value in (given or {}).items():
        if name == "weight":
            found.weight = float(value)
            continue
        try:
            indices, total = value
            several = isinstance(indices, list) and not isinstance(indices[0], int)
            shards = [as_ranges(each) for each in (indices if several else [indices])]
            found.axes[name] = Axis(int(total), shards)
        except (TypeError, ValueError, IndexError):
            raise InvalidArgumentError(
                f'describe["{name}"] must be (indices, total), such as (range(0, 4), 8), or '
                f"([range(0, 2), range(2, 4)], 8) for two micro-batches; got {value!r}"
            ) from None
    counts = {len(axis.shards) for axis in found.axes.values()} - {1}
    if len(counts) > 1:
        raise InvalidArgumentError(
            f"the axes of describe have indices of {sorted(counts)} micro-batches: pass one list "
            "of indices for each axis, or the same number of lists for all"
        )
    found.micro_batches = max(counts, default=1)
    return found


def describe_grid(
    model: DataParallelBucket, micro_batches: Sequence[Any], manager: ProcessGroupManager
) -> Description:
    """Return the description of this rank's shards in a step.

    Args:
        model: The model that `parallelize` returned.
        micro_batches: The micro-batches that `shard_global_batch` returned.
        manager: The grid.
    """
    if not isinstance(micro_batches[0], MicroBatch):
        given = type(micro_batches[0]).__name__
        raise TypeError(f"micro_batches must be what shard_global_batch returned, not a {given}")
    pipeline = pipeline_of(model)
    stage, cut = pipeline.module, micro_batches[0].cut
    found = Description(micro_batches=len(micro_batches))
    rows, count = row_count(cut.whole, cut.row_dims), len(micro_batches)
    if cut.own:  # each dp rank has read its own rows, the same number
        (own,) = rows_of_ranks(rows, 1, count)
        first, rows = manager.dp_rank * rows, rows * manager.dp_size
    else:
        own, first = rows_of_ranks(rows, manager.dp_size, count)[manager.dp_rank], 0
    shares = [(first + share.start, first + share.stop) for share in own]
    found.axes["rows"] = Axis(rows, [[share] for share in shares])
    length = 1 if cut.sequences is None else cut.sequences.layout.length
    positions = [0] if cut.sequences is None else cut.sequences.positions().tolist()
    found.axes["positions"] = Axis(length, [as_ranges(positions)])
    if terms_of(model).shares_sequences:
        (own_share,) = share_cut(len(positions), manager.tp_size).ranges[manager.tp_rank]
        share = positions[own_share.start : own_share.stop]
        found.axes["shares"] = Axis(length, [as_ranges(share)])
    for axis, _ in _divided(stage).values():
        found.axes |= axis
    found.places = places_of(stage)
    cuts = find_cuts(stage).values()
    found.shared = [_name(cut) for cut in cuts if cut.cut.replicated]
    for name in ("tp", "cp", "pp", "dp"):
        found.groups[name] = [list(ranks) for ranks in manager.grid.groups(name)]
    found.unseen = set(_unseen(pipeline))
    found.chunk = lambda: pipeline.runtime.chunks.selected
    found.terms = set(summed_outside(stage))
    return found


def places_of(stage: nn.Module) -> dict[str, Place]:
    """Return the places of this rank's sharded parameters in the full ones, by name."""
    return {name: place for name, (_, place) in _divided(stage).items()}


def _divided(stage: nn.Module) -> dict[str, tuple[Mapping[str, Axis], Place]]:
    """Return, for each sharded parameter, the axis of its tp dim (if any) and its place."""
    found: dict[str, tuple[Mapping[str, Axis], Place]] = {}
    cuts, expert_cuts = find_cuts(stage), find_expert_cuts(stage)
    for name, parameter in stage.named_parameters(remove_duplicate=False):
        place: Place = [None] * parameter.ndim
        axis: dict[str, Axis] = {}
        if cut := cuts.get(name):
            ranges = [(each.start, each.stop) for each in cut.cut.ranges[cut.layer.tp_rank]]
            place[cut.dim] = [cut.cut.whole, *ranges]
            axis = {_name(cut): Axis(cut.cut.whole, [ranges])}
        if experts := expert_cuts.get(name):
            place[0] = [experts.whole, (experts.own.start, experts.own.stop)]
        if cut or experts:
            found[name] = axis, place
    return found


def _name(cut: ParameterCut) -> str:
    """Return a name for the sharding of a dim over tp, the same on every rank."""
    places = zip(*cut.cut.ranges, strict=True)
    return f"columns {[[*map(len, dict.fromkeys(ranges))] for ranges in places]}"


def _unseen(pipeline: PipelineParallel) -> Iterator[tuple[str, str, int]]:
    """Yield modules whose inputs or outputs are another stage's hidden states, by chunk."""
    for chunk, stage in enumerate(pipeline.stages):
        pipeline.select(chunk)
        for name, module in pipeline.module.named_modules():
            if isinstance(module, PassThrough):
                yield from ((name, "in", chunk), (name, "out", chunk))
            elif any(isinstance(each, PassThrough) for each in module.modules()):
                if stage > 0:
                    yield name, "in", chunk
                if stage < pipeline.num_stages - 1:
                    yield name, "out", chunk
    pipeline.select_all()


def local_shard(tensor: Tensor) -> tuple[Tensor, Place | None, bool]:
    """Return a tensor's local shard, its place, and whether it is a term of a sum over ranks.

    Only a DTensor has a place (None for each dim that is not sharded) or can be such a term.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(tensor, module.DTensor):
        return _settled(tensor), None, False
    local, placements = _settled(tensor.to_local()), tensor.placements
    place: Place = [None] * tensor.ndim
    for axis, placement in enumerate(placements):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            length = int(tensor.shape[dim])
            held = torch.arange(length) if place[dim] is None else indices_of(place[dim][1:])
            own = _share(held, placement, tensor.device_mesh, axis)
            place[dim] = [length, *as_ranges(own.tolist())]
    return local, place, any(placement.is_partial() for placement in placements)


def _share(held: Tensor, placement: Any, mesh: Any, axis: int) -> Tensor:
    """Return a rank's indices of a sharded dim; packed weights have strided shards."""
    factor = getattr(placement, "split_factor", 1)
    groups = held.chunk(factor) if factor > 1 else (held,)
    ranks, own = mesh.size(axis), mesh.get_local_rank(axis)
    return torch.cat([c for g in groups for c in g.chunk(ranks)[own : own + 1]] or [held[:0]])


def indices_of(ranges: Sequence[Sequence[int]]) -> Tensor:
    """Return the indices in ranges [start, stop), int64."""
    return torch.cat([torch.arange(start, stop) for start, stop in ranges] or [torch.arange(0)])


def _settled(tensor: Tensor) -> Tensor:
    """Return a plain tensor in place of an asynchronous collective's result, after waiting."""
    return tensor if type(tensor) in (Tensor, nn.Parameter) else tensor.clone()


def tensors_of(value: Any, label: str) -> Iterable[tuple[str, Tensor]]:
    """Yield the tensors of a module's input or output, under names that are equal in all runs.

    Masks are left out, and tensors without values: others than plain ones, DTensors and results of
    collectives.
    """
    if isinstance(value, Tensor):
        plain = type(value) in (Tensor, nn.Parameter)
        real = plain or hasattr(value, "placements") or hasattr(value, "trigger_wait")
        if real and value.dtype != torch.bool:
            yield label, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from tensors_of(each, f"{label}.{name}")
    elif isinstance(value, (tuple, list)):
        names: Sequence[Any] = getattr(value, "_fields", range(len(value)))
        for name, each in zip(names, value, strict=False):
            yield from tensors_of(each, f"{label}.{name}")


def arguments_of(module: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a module is called with; keywords that have a position use that."""
    kind: Any = type(module)
    places = _places(kind)
    for place, value in enumerate(args):
        yield from tensors_of(value, f"in.{place}")
    for name, value in kwargs.items():
        yield from tensors_of(value, f"in.{places.get(name, name)}")


@lru_cache(maxsize=256)
def _places(kind: Any) -> Mapping[str, int]:
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for own in kind.__mro__:  # a forward(*args) that wraps another forward takes its arguments
        if "forward" in vars(own):
            named = list(inspect.signature(own.forward).parameters.values())[1:]
            if not named or named[0].kind == positional:
                return {e.name: place for place, e in enumerate(named) if e.kind == positional}
    return {}

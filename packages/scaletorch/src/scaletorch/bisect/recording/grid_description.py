"""The description of a rank of a grid, from this library's own sharding of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ...compose.batches import MicroBatch, rows_of_ranks
from ...compose.entries import row_count
from ...compose.forward import pipeline_of, terms_of
from ...parallel.data_parallel import DataParallelBucket
from ...parallel.expert_parallel.building import find_expert_cuts
from ...parallel.pg_manager import ProcessGroupManager
from ...parallel.pipeline_parallel import PipelineParallel
from ...parallel.pipeline_parallel.building import PassThrough
from ...parallel.placement import share_cut
from ...parallel.tensor_parallel.building import ParameterCut, find_cuts, summed_outside
from .descriptions import Axis, Description, Place, as_ranges


def describe_grid(
    model: DataParallelBucket, micro_batches: Sequence[Any], manager: ProcessGroupManager
) -> Description:
    """Return the description of this rank's shards in a step.

    Args:
        model: The model that `parallelize` returned.
        micro_batches: The micro-batches that `shard_global_batch` returned.
        manager: The grid.
    """
    pipeline = pipeline_of(model)
    if not isinstance(micro_batches[0], MicroBatch):
        raise TypeError(
            "micro_batches must be what shard_global_batch returned, got a list of "
            f"{type(micro_batches[0]).__name__}"
        )
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
    shapes = {name: p.shape for name, p in stage.named_parameters(remove_duplicate=False)}
    for name, cut in find_cuts(stage).items():
        if name not in shapes:
            continue
        ranges = [(each.start, each.stop) for each in cut.cut.ranges[cut.layer.tp_rank]]
        place: Place = [None] * len(shapes[name])
        place[cut.dim] = [cut.cut.whole, *ranges]
        found[name] = {_name(cut): Axis(cut.cut.whole, [ranges])}, place
    for name, experts in find_expert_cuts(stage).items():
        if name not in shapes:
            continue
        _, place = found.get(name, ({}, [None] * len(shapes[name])))
        place[0] = [experts.whole, (experts.own.start, experts.own.stop)]
        found[name] = found.get(name, ({}, place))[0], place
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

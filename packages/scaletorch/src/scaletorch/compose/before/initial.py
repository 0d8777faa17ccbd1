"""Refusing ranks that begin differently: by the call, the whole model, or the first batch."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from torch import nn

from ...dist.building import agree, caught, map_tensors
from ...dist.errors import MismatchError
from ...parallel.pg_manager import ProcessGroupManager
from ...parallel.pg_manager.building import digest_text, divided_modules
from ...parallel.tensor_parallel import TensorParallelLayer
from ..batches import Batch, MicroBatch
from ..digests import Key, parted_sides, text_hash
from ..entries import OF_LOSS

_SUBJECT = (
    "the values of the plain model that parallelize is to cut (build it from one seed, or load one "
    "checkpoint into it, on all ranks)"
)


def require_one_model(
    model: nn.Module,
    arguments: Mapping[str, Any],
    manager: ProcessGroupManager,
    *,
    init_sync: str,
    error: Exception | None,
) -> None:
    """Compare the arguments of `parallelize`, before anything is sharded.

    Arguments are compared over all ranks, parameters and buffers over tp and pp; over cp and dp
    `DataParallelBucket` compares them, once each rank has but its shards. It reads the whole model
    once, as fast as memory gives it, and sends 24 bytes a rank and axis.

    Args:
        model: The plain model.
        arguments: How it is to be put on the grid.
        manager: The grid.
        init_sync: "none" compares no values.
        error: A mistake that this rank has found.

    Raises:
        MismatchError: Ranks differ, or another one has found a mistake; on every rank.
    """
    lines = [f"{name}={value}" for name, value in arguments.items()]
    agree("the arguments given to parallelize", lines, manager.world_group, error=error)
    if manager.tp_size * manager.pp_size == 1 or init_sync == "none":
        return
    # A model that is built of sharded layers has one shard of each of their weights on each rank.
    sharded = divided_modules(model)
    sharded |= {m for m in model.modules() if isinstance(m, TensorParallelLayer)}
    tp = caught(agree, _SUBJECT, _values(model, sharded), manager.tp_group)
    pp = caught(agree, _SUBJECT, _values(model, set()), manager.pp_group)
    agree(_SUBJECT, [], manager.world_group, error=tp or pp)


def _values(model: nn.Module, without: Container[nn.Module]) -> list[str]:
    """Return a line for each parameter and buffer that is not of the modules left out."""
    sharded = {
        id(x)
        for module in model.modules()
        if module in without
        for x in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }
    named = (*model.named_parameters(), *model.named_buffers())
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    return [
        f"{name} {tuple(x.shape)} {x.dtype}{' frozen' * (id(x) in frozen)} has values "
        f"{digest_text(x)}"
        for name, x in named
        if id(x) not in sharded
    ]


def require_one_batch(micro_batches: Sequence[Batch], manager: ProcessGroupManager) -> None:
    """Compare the first batch over the ranks that have to hold the same one.

    The batch that `shard_global_batch` was given is the same on all ranks, or on those of a place
    on dp, if these have read its rows; the micro-batches, which may have been changed since, on
    ranks that differ in tp and pp alone. Entries for a loss that were put into them, and what one
    stage alone has left out, are the caller's.

    Raises:
        MismatchError: Ranks differ; on every rank, with the entry and the ranks.
    """
    cuts = {id(b.cut.whole): b.cut for b in micro_batches if isinstance(b, MicroBatch)}
    own = any(cut.own for cut in cuts.values())
    read = f"the rows of dp{manager.dp_rank}" if own else "the global batch"
    place = f"dp{manager.dp_rank} cp{manager.cp_rank}"
    called: Sequence[Batch] = micro_batches
    if cuts:
        called = [{n: x for n, x in b.items() if not n.startswith(OF_LOSS)} for b in micro_batches]
    looks = [*_looks(read, [cut.whole for cut in cuts.values()]), *_looks(place, called)]
    whole = read if cuts else place  # of which no rank may leave out an entry
    names = [key.name for key, _ in looks if key.kind == whole]
    looks.append((Key(whole, "the list of entries"), text_hash(str(names))))
    parted = parted_sides(looks, manager)
    for (where, name, _), (usual, *others) in parted.items():
        odd = sorted(rank for side in others for rank in side)
        shown = ", ".join(f"rank {rank} ({manager.grid.coordinates(rank)})" for rank in odd[:4])
        raise MismatchError(
            f"ranks hold another first batch where they need the same one ({where}): {name} "
            f"on {shown} is not that of rank {usual[0]}; let every rank read the same batch, "
            "and seed what draws it alike"
        )


def _looks(where: str, batches: Sequence[Batch]) -> list[tuple[Key, int]]:
    """Return the digest of each entry of some batches."""
    names = sorted({name for batch in batches for name in batch})
    return [
        (Key(where, name), text_hash(str([_text(b[name]) for b in batches if name in b])))
        for name in names
    ]


def _text(entry: Any) -> str:
    """Return the digests of an entry's tensors, and all else that has the same text everywhere."""
    found = map_tensors(digest_text, entry)
    plain = isinstance(found, str | int | float | complex | Mapping | list | tuple | None)
    return repr(found) if plain else type(found).__name__

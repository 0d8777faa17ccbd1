"""What all ranks must begin with alike: the call, the whole model, and the first batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..dist import all_gather_object
from ..dist.agreement import agree, caught
from ..dist.errors import MismatchError
from ..parallel.pg_manager import ProcessGroupManager
from .batches import Batch, MicroBatch
from .digest import digest

_SUBJECT = (
    "the plain model and the arguments given to parallelize (build the model from one seed, or "
    "load one checkpoint, on all ranks, before it is cut)"
)


def require_one_model(
    model: nn.Module,
    arguments: Mapping[str, Any],
    manager: ProcessGroupManager,
    *,
    values: str,
    error: Exception | None,
) -> None:
    """Compare over all ranks what `parallelize` was given, before anything is cut.

    Reads all parameters and buffers once, about 1 GB a second on a CPU, and sends 24 bytes a rank.

    Args:
        model: The plain model.
        arguments: How it is to be put on the grid.
        manager: The grid.
        values: What becomes of values that differ, an ``init_sync``: "check" compares them on all
            ranks; "broadcast", which will send those of the first cp and dp rank to the others,
            over tp and pp; "none" nowhere.
        error: A mistake that this rank has found.

    Raises:
        MismatchError: Ranks differ, or another one has found a mistake; on every rank.
    """
    lines = [f"{name}={value}" for name, value in arguments.items()]
    if error is None and manager.grid.world_size > 1:
        lines += [f"{name} of {_form(tensor)}" for name, tensor in _named(model)]
        if values == "check":
            lines += _values(model)
        elif values == "broadcast" and manager.tp_size * manager.pp_size > 1:
            alike: Any = _values(model)
            error = caught(agree, _SUBJECT, alike, manager.tp_group)
            error = caught(_agree_or_tell, alike, manager, error)
    agree(_SUBJECT, lines, manager.world_group, error=error)


def _agree_or_tell(lines: list[str], manager: ProcessGroupManager, error: Exception | None) -> None:
    agree(_SUBJECT, lines, manager.pp_group, error=error)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _values(model: nn.Module) -> list[str]:
    return [f"{name} has values {digest(tensor)}" for name, tensor in _named(model)]


def require_one_batch(micro_batches: Sequence[Batch], manager: ProcessGroupManager) -> None:
    """Compare the first batch over the ranks that have to hold the same one.

    Those are all ranks where `shard_global_batch` has cut it, and otherwise the ranks of one row of
    tp and pp.

    Raises:
        MismatchError: Ranks differ; on every rank, with the entry and the ranks.
    """
    cut = next((b.cut for b in micro_batches if isinstance(b, MicroBatch)), None)
    place = "the global batch" if cut else f"dp{manager.dp_rank} cp{manager.cp_rank}"
    batches = micro_batches if cut is None else [cut.whole]
    mine = [
        (name, [digest(batch[name]) for batch in batches if name in batch])
        for name in sorted({name for batch in batches for name in batch})
    ]
    everyone = all_gather_object((place, mine), manager.world_group)
    of: dict[str, list[int]] = {}
    for rank, (where, _) in enumerate(everyone):
        of.setdefault(where, []).append(rank)
    for where, ranks in of.items():
        _require_equal(where, ranks, [dict(everyone[rank][1]) for rank in ranks], manager)


def _require_equal(
    where: str, ranks: Sequence[int], found: Sequence[dict[str, Any]], manager: ProcessGroupManager
) -> None:
    for name in sorted({name for each in found for name in each}):
        odd = [
            r for r, each in zip(ranks, found, strict=True) if each.get(name) != found[0].get(name)
        ]
        if odd:
            shown = ", ".join(f"rank {rank} ({manager.grid.coordinates(rank)})" for rank in odd[:4])
            raise MismatchError(
                f"ranks hold another first batch where they need the same one ({where}): {name} "
                f"on {shown} is not that of rank {ranks[0]}; let every rank read the same batch, "
                "and seed what draws it alike"
            )

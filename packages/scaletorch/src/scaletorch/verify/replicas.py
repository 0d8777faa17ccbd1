"""Tensors that ranks hold: which part of the whole, and the same bits where several have it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from ..compose.digests import keyed_pieces, parted_sides
from ..dist import get_rank
from ..parallel.expert_parallel.building import find_expert_cuts
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.pg_manager.building import digest
from ..parallel.tensor_parallel import take_own
from .compare import INFINITE, Difference, Shard


def missing(
    kind: str, step: int, held: Iterable[str], theirs: Iterable[str], bound: float
) -> Iterator[Difference]:
    """Report tensors of one process that are not among those held."""
    for name in sorted(set(theirs) - set(held)):
        yield Difference(f"{kind} {name}", step, INFINITE, bound, note="missing on this layout")


def doubled(
    stages: Iterable[Iterable[str]], tied: Iterable[str], bound: float
) -> Iterator[Difference]:
    """Report parameters that several stages hold without being tied: they would count twice."""
    stages = list(stages)
    for name in sorted({name for names in stages for name in names} - set(tied)):
        owners = [stage for stage, names in enumerate(stages) if name in names]
        if len(owners) > 1:
            note = f"held by stages {owners}, and not tied: it counts {len(owners)} times"
            yield Difference(f"parameter {name}", 0, INFINITE, bound, note=note)


def unlike(
    kind: str,
    step: int,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    manager: ProcessGroupManager,
    bound: float,
) -> Iterator[Difference]:
    """Report tensors of which another rank that holds the same part has other bits.

    Args:
        kind: What they are.
        step: 0-based.
        model: What `parallelize` returned.
        tensors: This rank's, by plain names.
        manager: The grid.
        bound: What to report as the bound.
    """
    held = {key: digest(piece) for _, key, piece in keyed_pieces(model, tensors, manager)}
    for key, sides in parted_sides([*held.items()], manager).items():
        if key in held:
            other = min(rank for side in sides if get_rank() not in side for rank in side)
            note = f"rank {other} holds other bits of it: never synchronised"
            yield Difference(f"{kind} {key.name}", step, INFINITE, bound, note=note)


def own_part(model: nn.Module) -> Shard:
    """Return what takes this rank's part of one process's tensor, by its plain name."""
    cuts = find_expert_cuts(model)

    def take(name: str, whole: Tensor) -> Tensor:
        cut = cuts.get(name)
        own = take_own(model, name, whole)  # an expert may be cut over tp, too
        return own if cut is None else own[cut.own.start : cut.own.stop]

    return take

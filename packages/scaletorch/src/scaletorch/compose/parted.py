"""Replicas of parameters that are no longer equal: which, where, how far, and the likely cause."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..dist import all_gather_object, broadcast, get_comm_device, get_rank, group_ranks
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from .digests import Key, digest
from .replicas import HEAD, SHOWN, Table, exchange, refuse
from .updates import gradients_changed

Sides = Sequence[Sequence[int]]  # ranks that hold the same, the most of them first

PIECE = 2**20  # elements that are compared at a time
MEASURED = 2**26  # elements that are compared at most
FEW = 0.1  # share of the parameters that a change by hand may have parted
EXACT = ("cpu",)  # devices whose kernels sum in one order, so that equal inputs give equal bits
ROUNDING = 1e-3  # of the largest value: how far kernels may part that sum in no fixed order
_CLIPPED = (
    "torch.nn.utils.clip_grad_norm_ scales gradients by another norm on each rank, of the shards, "
    "stage or experts that it has: use scaletorch.compose.clip_grad_norm_(model, max_norm)"
)
_CHANGED = f"All gradients had been changed in place after train_step. {_CLIPPED}"
_SCALED = (
    f"Likely gradients were clipped on each rank alone: {_CLIPPED}. Or optimizers have other "
    "settings, or a value of the first of these was changed by hand, which parts the others too"
)
_BY_HAND = (
    "Likely a value was changed by hand on some ranks alone, or a memory is faulty: change values "
    "on all ranks alike"
)
_SETTINGS = (
    "Likely the optimizer there has other settings (its learning rate) or left out a step, or "
    "other weights were loaded: make optimizers and load weights alike on all ranks"
)
_BACK = "; go on from a checkpoint from before."


class Distance(NamedTuple):
    """How far replicas are apart.

    Attributes:
        elements: How many differ on this rank from the first one of the majority.
        size: How many there are.
        most: The largest difference.
        largest: The largest absolute value.
    """

    elements: int
    size: int
    most: float
    largest: float

    def relative(self) -> float:
        """Return the largest difference in units of the largest value."""
        return self.most / (self.largest or 1.0)

    def __str__(self) -> str:
        """Return it as words for a message."""
        if not self.elements:
            return "the same again by now"
        return (
            f"{self.elements} of {self.size} elements, by up to {self.most:.2g} where values "
            f"reach {self.largest:.3g}"
        )


def refuse_parted(
    model: nn.Module,
    values: Mapping[Key, Tensor],
    taken: Mapping[Key, Tensor],
    manager: ProcessGroupManager,
) -> list[Key]:
    """Compare all replicated parameters, and raise on every rank if any differ; all ranks call it.

    Args:
        model: What `parallelize` returned.
        values: This rank's parameters.
        taken: Digests of an earlier sample, which count for these parameters.
        manager: The grid.

    Returns:
        Parameters that differ over tp within rounding alone, on an accelerator; it has warned.

    Raises:
        MismatchError: Others differ.
    """
    digests = [(key, taken[key] if key in taken else digest(x)) for key, x in values.items()]
    table, numbers = exchange(model, digests, 0, manager)
    numbers = numbers[:, HEAD:]
    unequal = table.unequal(numbers)
    if not unequal:
        return []
    sides = {key: table.sides(key, numbers) for key in unequal}
    found = dict(_distances(sides, values, manager))
    inexact = sorted({each.device.type for each in values.values()} - {*EXACT})
    facts = [found[key].relative() if key in found else 0.0 for key in unequal]
    told = all_gather_object((facts, gradients_changed(model), inexact), manager.world_group)
    apart = dict(zip(unequal, map(max, *(facts for facts, _, _ in told)), strict=True))
    unequal.sort(key=apart.__getitem__, reverse=True)
    changed = any(changed for _, changed, _ in told)
    devices = sorted({device for _, _, inexact in told for device in inexact})
    if devices and not changed and apart[unequal[0]] <= ROUNDING and _over_tp(sides, manager):
        _warn_of(unequal, apart[unequal[0]], devices)
        return unequal
    own = get_rank(manager.world_group)
    texts = {key: str(each) for key, each in found.items() if own not in sides[key][0]}
    cause = _cause(unequal, table, changed=changed, by_shard=_by_shard(sides, manager))
    refuse(unequal, table, numbers, texts, manager, None, advice=cause + _BACK)


def _distances(
    sides: Mapping[Key, Sides],
    values: Mapping[Key, Tensor],
    manager: ProcessGroupManager,
) -> Iterator[tuple[Key, Distance]]:
    """Yield how far this rank's values are from those of the majority, the smallest first."""
    real = {
        key: torch.view_as_real(values[key]) if values[key].is_complex() else values[key]
        for key in sides
        if key in values
    }
    own = [real[key].numel() if key in real else 0 for key in sides]
    theirs = all_gather_object(own, manager.world_group)
    sizes = dict(zip(sides, map(max, *theirs), strict=True))
    total = 0
    for key in sorted(sides, key=lambda key: (sizes[key], key)):
        total += sizes[key]
        if total > MEASURED and total > sizes[key]:
            return
        distance = _distance(real.get(key), sizes[key], sides[key][0][0], manager)
        if key in real:
            yield key, distance


def _distance(
    values: Tensor | None, size: int, source: int, manager: ProcessGroupManager
) -> Distance:
    """Compare this rank's values with those of a rank; all ranks call it."""
    group, device = manager.world_group, get_comm_device(manager.world_group)
    elements, most, largest = 0, 0.0, 0.0
    for start in range(0, size, PIECE):
        theirs = torch.zeros(min(PIECE, size - start), dtype=torch.float64, device=device)
        mine = theirs
        if values is not None:
            mine = values.reshape(-1)[start : start + PIECE].to(device, torch.float64)
        if get_rank(group) == source:
            theirs.copy_(mine)
        broadcast(theirs, group_ranks(group)[source], group)
        unlike = (mine != theirs) & ~(mine.isnan() & theirs.isnan())
        elements += int(unlike.sum())
        far = torch.where(unlike, (mine - theirs).abs(), 0.0).nan_to_num(torch.inf)
        most = max(most, float(far.max()))
        largest = max(largest, float(theirs.abs().nan_to_num(0.0, posinf=0.0).max()))
    return Distance(elements, size, most, largest)


def _over_tp(sides: Mapping[Key, Sides], manager: ProcessGroupManager) -> bool:
    """Return whether only ranks of different tp coordinates differ."""
    of, grid = group_ranks(manager.world_group), manager.grid
    return _divided(sides, [(grid.coordinates(rank).tp,) for rank in of])


def _by_shard(sides: Mapping[Key, Sides], manager: ProcessGroupManager) -> bool:
    """Return whether only ranks differ that have other shards, stages or experts."""
    of, grid = group_ranks(manager.world_group), manager.grid
    if grid.is_plain and manager.tp_size * manager.pp_size == 1:
        return False
    places = [(grid.coordinates(rank), grid.expert_coordinates(rank)) for rank in of]
    return _divided(sides, [(place.pp, place.tp, expert.ep) for place, expert in places])


def _divided(sides: Mapping[Key, Sides], places: Sequence[tuple[int, ...]]) -> bool:
    """Return whether ranks of one place are always on one side."""
    for each in sides.values():
        side_of: dict[tuple[int, ...], int] = {}
        for side, ranks in enumerate(each):
            if any(side_of.setdefault(places[rank], side) != side for rank in ranks):
                return False
    return True


def _warn_of(keys: Sequence[Key], most: float, devices: Sequence[str]) -> None:
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    warnings.warn(
        f"{describe_rank()}: tp ranks no longer hold the same of "
        f"{', '.join(key.name for key in keys[:SHOWN])}{more}: up to {most:.1e} of the largest "
        f"value apart, as kernels of {', '.join(devices)} do that sum in no fixed order; from now "
        "on these are not compared (check_replicas does)",
        stacklevel=4,
    )


def _cause(unequal: Sequence[Key], table: Table, *, changed: bool, by_shard: bool) -> str:
    """Return what likely parted the ranks, and the way out."""
    if changed and by_shard:
        return _CHANGED
    holders: dict[Key, list[int]] = {}
    for rank, keys in enumerate(table.keys):
        for key in keys:
            holders.setdefault(key, []).append(rank)
    concerned = [holders[key] for key in unequal]
    compared = sum(ranks in concerned for ranks in holders.values())
    if len(unequal) <= max(1, FEW * compared):
        return _BY_HAND
    return _SCALED if by_shard else _SETTINGS

"""Positions: given to a model only if it could not count them itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ...dist import get_rank
from ...dist.building import tensors_in
from ...parallel.context_parallel.building import apart, looking
from ..forward import Counting, Terms
from ..row_dims import POSITIONS

_LENGTH = 4
_COUNTS = "create_position_ids_from_input_ids"


def ask_positions(model: nn.Module, terms: Terms) -> None:
    """Note whether a model's own positions are others than those that it would be given.

    It runs on four tokens: as it is, with positions 0 to 3, and with those that it says it counts
    of them. If a model cannot run so, or is on the meta device, a warning says so.

    Args:
        model: The plain model.
        terms: How it wants to be called.
    """
    wants = POSITIONS in terms.arguments and not terms.needs(POSITIONS)
    first = next(model.parameters(), None)
    if not wants:
        return
    if first is None or any(p.is_meta for p in model.parameters()):
        _warn(model, "it has parameters on the meta device" if first is not None else "it has none")
        return
    ids = torch.arange(_LENGTH, device=first.device)[None]
    counting = _counting(model)
    why = "it returned no tensors"
    own, given, counted = list[Tensor](), list[Tensor](), None
    with looking(model):
        try:
            own, given = _tensors(model(ids)), _tensors(model(ids, position_ids=ids))
            counted = counting and _tensors(model(ids, position_ids=counting(ids)))
        except Exception as error:  # it needs more than tokens
            own, why = [], f"{type(error).__name__}: {error}"
    if not own:
        _warn(model, why)
        return
    if not _differ(own, given):
        return
    terms.counts_otherwise = True
    if counted is not None and not _differ(own, counted):
        terms.counting = counting


def _warn(model: nn.Module, why: str) -> None:
    if get_rank() == 0:
        warnings.warn(
            f"{type(model).__name__} could not be asked on four tokens how it counts its positions "
            f"({why}): where sequences are divided it is given 0, 1, 2, ...; if it counts "
            "otherwise where it is given none, put those that it uses into the global batch as "
            "position_ids",
            RuntimeWarning,
            stacklevel=2,
        )


def _counting(model: nn.Module) -> Counting | None:
    """Return how a model counts positions of whole rows of ids, as RoBERTa and its kin say it."""
    for module in model.modules():
        count, padding = getattr(module, _COUNTS, None), getattr(module, "padding_idx", None)
        if callable(count) and isinstance(padding, int):
            return partial(_count, count, padding)
    return None


def _count(count: Callable[[Tensor, int], Tensor], padding: int, ids: Tensor) -> Tensor:
    return count(ids, padding)


def _tensors(output: object) -> list[Tensor]:
    """Return the logits of an output, or all of its tensors."""
    return [*tensors_in(getattr(output, "logits", output))]


def _differ(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) != len(other) or any(map(apart, one, other))

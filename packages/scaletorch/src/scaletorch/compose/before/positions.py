"""Positions: given to a model only if it could not count them itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ...parallel.context_parallel.building import apart, looking
from ..forward import Counting, Terms
from ..row_dims import POSITIONS

_LENGTH = 4
_COUNTS = "create_position_ids_from_input_ids"


def ask_positions(model: nn.Module, terms: Terms) -> None:
    """Note whether a model's own positions are others than those that it would be given.

    It runs on four tokens: as it is, with positions 0 to 3, and with those that it says it counts
    of them. A model that cannot run so, or is on the meta device, is not asked.

    Args:
        model: The plain model.
        terms: How it wants to be called.
    """
    wants = POSITIONS in terms.arguments and not terms.needs(POSITIONS)
    first = next(model.parameters(), None)
    if not wants or first is None or any(p.is_meta for p in model.parameters()):
        return
    ids = torch.arange(_LENGTH, device=first.device)[None]
    counting = _counting(model)
    with looking(model):
        try:
            own, given = _logits(model(ids)), _logits(model(ids, position_ids=ids))
            counted = counting and _logits(model(ids, position_ids=counting(ids)))
        except Exception:  # it needs more than tokens: nothing can be told
            return
    if own is None or given is None or not apart(own, given):
        return
    terms.counts_otherwise = True
    if counted is not None and not apart(own, counted):
        terms.counting = counting


def _counting(model: nn.Module) -> Counting | None:
    """Return how a model counts positions of whole rows of ids, as RoBERTa and its kin say it."""
    for module in model.modules():
        count, padding = getattr(module, _COUNTS, None), getattr(module, "padding_idx", None)
        if callable(count) and isinstance(padding, int):
            return partial(_count, count, padding)
    return None


def _count(count: Callable[[Tensor, int], Tensor], padding: int, ids: Tensor) -> Tensor:
    return count(ids, padding)


def _logits(output: object) -> Tensor | None:
    value = getattr(output, "logits", output)
    return value if isinstance(value, Tensor) else None

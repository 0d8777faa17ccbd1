"""Positions: given to a model only if it could not count them itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...parallel.context_parallel.building import apart, looking
from ..batches import POSITIONS
from ..forward import Terms

_LENGTH = 4


def counts_otherwise(model: nn.Module, terms: Terms) -> bool:
    """Return whether a model's own positions are others than those that it would be given.

    It runs twice on four tokens: as it is, and with positions 0 to 3. A model that cannot run so,
    or is on the meta device, is not asked.

    Args:
        model: The plain model.
        terms: How it wants to be called.
    """
    wants = POSITIONS in terms.arguments and not terms.needs(POSITIONS)
    first = next(model.parameters(), None)
    if not wants or first is None or any(p.is_meta for p in model.parameters()):
        return False
    ids = torch.arange(_LENGTH, device=first.device)[None]
    with looking(model):
        try:
            own, given = _logits(model(ids)), _logits(model(ids, position_ids=ids))
        except Exception:  # it needs more than tokens: nothing can be told
            return False
    return own is not None and given is not None and apart(own, given)


def _logits(output: object) -> Tensor | None:
    value = getattr(output, "logits", output)
    return value if isinstance(value, Tensor) else None

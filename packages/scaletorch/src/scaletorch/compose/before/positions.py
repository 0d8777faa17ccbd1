"""Positions: given to a model only if it could not count them itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...dist.errors import InvalidArgumentError
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

    Raises:
        InvalidArgumentError: It has changed itself as it ran.
    """
    wants = POSITIONS in terms.arguments and not terms.needs(POSITIONS)
    first = next(model.parameters(), None)
    if not wants or first is None or any(p.is_meta for p in model.parameters()):
        return False
    ids, modules = torch.arange(_LENGTH, device=first.device)[None], [*model.modules()]
    with looking(model):
        try:
            own, given = _logits(model(ids)), _logits(model(ids, position_ids=ids))
        except Exception:  # it needs more than tokens: nothing can be told
            return False
    if modules != [*model.modules()]:
        raise InvalidArgumentError(
            f"{terms.name} makes modules anew when it runs on a short sequence, and was to be run "
            "on one, to see how it counts positions: leave sequences whole (cp_size=1, "
            "sequence_parallel=False), or make it so that it stays as it is (BigBird: of "
            "attention_type 'original_full')"
        )
    return own is not None and given is not None and apart(own, given)


def _logits(output: object) -> Tensor | None:
    value = getattr(output, "logits", output)
    return value if isinstance(value, Tensor) else None

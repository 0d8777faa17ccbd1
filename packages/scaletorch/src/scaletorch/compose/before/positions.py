"""Positions: given to a model only if it could not count them itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...dist.errors import InvalidArgumentError
from ...parallel.context_parallel.building import apart, looking
from ..batches import Batch, MicroBatch
from ..forward import Terms

POSITIONS = "position_ids"
_APART = ("input_ids", "labels")  # entries that are not passed on by name
_LENGTH = 4
_OTHERWISE = (
    "{} counts its positions otherwise than 0, 1, 2, ... where it is given none (from behind its "
    "padding index, perhaps), and where sequences are divided it has to be given them: put those "
    "that it uses into the global batch as position_ids [B, L], or leave sequences whole "
    "(cp_size=1, sequence_parallel=False)"
)


def as_called(batch: Batch, terms: Terms) -> Batch:
    """Return a micro-batch with the entries that the model is to be called with.

    Raises:
        InvalidArgumentError: It was cut in another layout than the model's, or has entries that
            the model's forward does not take, or lacks positions that nobody else knows.
    """
    cut = batch.cut if isinstance(batch, MicroBatch) else None
    if cut is not None and terms.cp_layout not in (None, cut.layout):
        raise InvalidArgumentError(
            f"this batch was cut in a {cut.layout} layout, and the model attends in a "
            f"{terms.cp_layout} one: let shard_global_batch ask the model, "
            "shard_global_batch(..., model=model)"
        )
    entries = dict(batch)
    given = POSITIONS in entries and not (cut is not None and cut.counted)
    if terms.counts_otherwise and not given:
        raise InvalidArgumentError(_OTHERWISE.format(terms.name))
    if not given and not terms.takes(POSITIONS):
        entries.pop(POSITIONS, None)  # whether it counts them itself is asked in the first step
    strangers = [name for name in entries if name not in _APART and not terms.takes(name)]
    if strangers:
        raise InvalidArgumentError(
            f"the batch has {', '.join(strangers)}, and the forward of {terms.name} takes no "
            f"argument of that name, only {', '.join(terms.arguments)}; leave it out of the batch, "
            "or let forward take it"
        )
    if POSITIONS not in entries and _must_be_told(terms):
        ids = entries["input_ids"]
        entries[POSITIONS] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    return entries


def _must_be_told(terms: Terms) -> bool:
    """Return whether a model cannot count: it does not want to, or would count a shard's tokens."""
    return terms.needs(POSITIONS) or (terms.shares_sequences and terms.takes(POSITIONS))


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

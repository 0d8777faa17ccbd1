"""What a model is called with: a micro-batch, without what is for its loss alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dist.errors import InvalidArgumentError
from .batches import OF_LOSS, POSITIONS, Batch, MicroBatch
from .forward import Terms

_APART = ("input_ids", "labels")  # entries that are not passed on by name
_OTHERWISE = (
    "{} counts its positions otherwise than 0, 1, 2, ... where it is given none (from behind its "
    "padding index, perhaps), and where sequences are divided it has to be given them: put those "
    "that it uses into the global batch as position_ids [B, L], or leave sequences whole "
    "(cp_size=1, sequence_parallel=False)"
)


class Called(dict[str, Tensor]):
    """The entries that a model is called with.

    Attributes:
        micro_batch: What they were made of.
        count: How much of it counts in the loss, if this rank computes that.
    """

    def __init__(self, entries: Batch, micro_batch: Batch) -> None:
        super().__init__(entries)
        self.micro_batch = micro_batch
        self.count: float = 0.0


def as_called(batch: Batch, terms: Terms) -> Called:
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
    entries: dict[str, Any] = {n: x for n, x in batch.items() if not n.startswith(OF_LOSS)}
    if terms.keeps_cache:  # no use in training, and a layer that runs again would add to it again
        entries.setdefault("use_cache", False)
    given = POSITIONS in entries and not (cut is not None and cut.counted)
    if terms.counts_otherwise and not given:
        raise InvalidArgumentError(_OTHERWISE.format(terms.name))
    if not given and (terms.counts_of_ids or not terms.takes(POSITIONS)):
        entries.pop(POSITIONS, None)  # whether it counts them itself is asked in the first step
    strangers = [name for name in entries if name not in _APART and not terms.takes(name)]
    if strangers:
        raise InvalidArgumentError(
            f"the batch has {', '.join(strangers)}, and the forward of {terms.name} takes no "
            f"argument of that name, only {', '.join(terms.arguments)}; leave it out of the batch, "
            f"or let forward take it; what a loss_fn alone is to see is named {OF_LOSS}..."
        )
    if POSITIONS not in entries and _must_be_told(terms):
        ids = entries["input_ids"]
        entries[POSITIONS] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    return Called(entries, batch)


def _must_be_told(terms: Terms) -> bool:
    """Return whether a model cannot count: it does not want to, or would count a shard's tokens."""
    counts = not terms.shares_sequences or terms.counts_of_ids
    return terms.needs(POSITIONS) or (not counts and terms.takes(POSITIONS))

"""Run a plain model in one process: call it with a batch, and compute a loss_fn of its output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .batches import shard_global_batch
from .entries import LABELS, OF_LOSS, RowDims, first_entry, named_entries
from .forward import read_terms
from .loss import LossBatch


@dataclass(frozen=True, slots=True)
class OneProcess:
    """A stand-in for the grid of one process, in which every axis has size 1."""

    group: ProcessGroup | None

    def __getattr__(self, name: str) -> Any:
        """Return the group of an axis, its size or this rank's place on it."""
        found = {"group": self.group, "size": 1, "rank": 0}
        kind = name.rpartition("_")[2]
        if kind not in found:
            raise AttributeError(name)
        return found[kind]


def entries_for(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return a batch's entries by name; the first one is the model's first argument."""
    terms = read_terms(model)
    entries = named_entries(batch, terms.arguments)
    first = first_entry(entries, terms.arguments, terms.name)
    return {first: entries.pop(first), **entries}


def call_plain(model: nn.Module, entries: Mapping[str, Any]) -> Any:
    """Return the output of a plain model for the entries of `entries_for`, except the loss's."""
    first, *others = (n for n in entries if n != LABELS and not n.startswith(OF_LOSS))
    return model(entries[first], **{name: entries[name] for name in others})


def plain_loss(
    loss_fn: Any,
    output: Any,
    entries: Mapping[str, Any],
    row_dims: RowDims | None = None,
    sequence_dims: RowDims | None = None,
) -> Tensor:
    """Return sum / count of a loss_fn for the whole batch."""
    alone = cast(Any, OneProcess(None))
    told: Any = {"row_dims": row_dims, "sequence_dims": sequence_dims}
    (batch,) = shard_global_batch(entries, 1, alone, **told)
    total, count = loss_fn(output, LossBatch(batch, None, alone))
    return cast(Tensor, total / count)

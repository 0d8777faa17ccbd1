"""One batch of sequences of any length: an object that holds their layout and documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...dist.errors import InvalidArgumentError
from ..pg_manager import IGNORED, describe_rank
from ..pg_manager.building import mean_over
from .cp_comms import ring_of
from .layouts import named_layout
from .masks import CU_SEQLENS, Documents, read_documents
from .models.settings import ActiveBatch, use_batch
from .models.transformers_attention import temporary_attention
from .sharding import (
    DEFAULT,
    batch_shape,
    is_sequence,
    local_shard,
    shard_batch,
    unshard_sequence,
)


class ShardedSequences:
    """The sequences of a batch, sharded over the ranks, with their layout and documents.

    Lengths that do not divide are padded internally. Attention ignores the padding, the targets
    exclude it, and results are returned without it.

    Example:
        >>> sequences = ShardedSequences(input_ids.shape[1])
        >>> mine = sequences.shard({"input_ids": input_ids, "labels": input_ids})
        >>> with sequences.inside(model):
        ...     logits = model(mine["input_ids"], mine["position_ids"])
        ...     loss = F.cross_entropy(logits.mT, mine["labels"], reduction="sum")
        ...     sequences.loss(loss, (mine["labels"] != -100).sum()).backward()
    """

    def __init__(
        self,
        length: int,
        *,
        layout: str = DEFAULT,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        """Divide the positions among the ranks.

        Args:
            length: Length of the whole sequences.
            layout: A name of `LAYOUTS`.
            cu_seqlens: First positions of packed documents in the whole sequence, and its length:
                integers (0, a, ..., length), the same for all sequences of the batch.
            group: The ranks; by default the manager's cp axis.
        """
        self.ring = ring_of(group)
        self.layout = named_layout(layout, length, self.ring.size)
        self.documents = None if cu_seqlens is None else read_documents(cu_seqlens, length)
        self._all_documents: Documents = self.documents or (0, length)

    def shard(self, batch: Mapping[str, Any], *, shifted: bool = False) -> dict[str, Any]:
        """Return a batch with this rank's shard of every sequence in it, [B, padded length / N].

        Args:
            batch: `input_ids` [B, length], the same on every rank. Optional `labels` [B, length],
                NOT shifted: `labels[:, i]` is the label of `input_ids[:, i]`, as for models of
                transformers. Optional `position_ids` [B, length], [1, length] or
                [axes, B, length]; added if absent. Any other tensor [B, length] is a sequence as
                well; all other entries are passed on. `cu_seq_lens_q`, `cu_seq_lens_k` and
                `cu_seqlens` must equal these documents.
            shifted: The labels are targets already: `labels[:, i]` is that of `input_ids[:, i]`.

        Returns:
            A new dict. `labels` are targets, shifted before sharding: the next label of the same
            document, and -100 at each document's end; do not shift them again. `position_ids`
            count within each document. Padding has label -100, and 0 in all other entries.

        Raises:
            InvalidArgumentError: No `input_ids` [B, length], labels or position_ids of another
                shape, or other documents.
        """
        shape = batch_shape(batch)
        if shape[1] != self.layout.length:
            raise InvalidArgumentError(
                f"{describe_rank()}: these are sequences of {self.layout.length} positions, and "
                f"input_ids are {list(shape)}"
            )
        self._require_documents(batch)
        whole, documents = dict(batch), self._all_documents
        if whole.get("position_ids") is None:
            ids = _positions_within(documents, whole["input_ids"].device)
            whole["position_ids"] = ids.expand(shape)
        if whole.get("labels") is not None and not shifted:
            whole["labels"] = _next_labels(whole["labels"], documents)
        missing = self.layout.padded_length - self.layout.length
        for name, value in whole.items():
            if is_sequence(name, value, shape):
                whole[name] = F.pad(value, (0, missing), value=IGNORED if name == "labels" else 0)
        return shard_batch(whole, self.ring.group, layout=self.layout)

    def shard_tensor(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's shard of one whole tensor; `unshard` is the inverse.

        `x` is the same on every rank, with all positions along `dim`; any dtype. The result has the
        length `padded length / N` along `dim`; padding is 0.
        """
        length = self.layout.length
        if not -x.ndim <= dim < x.ndim or x.shape[dim] != length:
            raise InvalidArgumentError(
                f"{describe_rank()}: these are sequences of {length} positions, and dim {dim} of "
                f"a tensor {list(x.shape)} has not as many"
            )
        dim %= x.ndim
        later_dims = [0, 0] * (x.ndim - 1 - dim)
        padded = F.pad(x, (*later_dims, 0, self.layout.padded_length - length))
        return local_shard(padded, dim, self.layout, self.ring.index).contiguous()

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """Run a model on these sequences within a context.

        Its attention ignores padding, and each position sees its own document only, also in
        attention that backward recomputes. The model is the result of `apply_context_parallel` over
        the same ranks, or a module that contains it.

        Raises:
            StateError: No module of it is context parallel, or it runs inside other sequences.
            InvalidArgumentError: It is context parallel over other ranks.
        """
        batch, alone = ActiveBatch(self.layout, self._all_documents), self.ring.size == 1
        with use_batch(model, batch, self.ring), temporary_attention(model, enabled=alone):
            yield

    def loss(self, sum: Tensor, count: Tensor | int) -> Tensor:
        """Return the mean loss over all ranks' tokens, the same on every rank.

        Each rank's backward gives partial gradients: sum them over the ranks. If no rank has a
        token, the loss is 0, with gradients of 0.

        Args:
            sum: Sum of this rank's token losses, 0-d floating point.
            count: Number of those tokens; may be 0.
        """
        return mean_over(sum, count, self.ring.group if self.ring.size > 1 else None)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Gather the ranks' shards along `dim` to the whole: see `unshard_sequence`."""
        return unshard_sequence(x, dim, self.ring.group, layout=self.layout)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Return this rank's positions, int64 [L]; those at or beyond the length are padding."""
        return self.layout.positions(self.ring.index, device)

    def _require_documents(self, batch: Mapping[str, Any]) -> None:
        documents = self._all_documents
        for name in CU_SEQLENS:
            value = batch.get(name)
            if value is not None and (found := read_documents(value, documents[-1])) != documents:
                raise InvalidArgumentError(
                    f"{describe_rank()}: the batch's {name} are {found}, and these sequences have "
                    f"documents {documents}; pass them once, as ShardedSequences(..., "
                    f"cu_seqlens={name})"
                )


def _positions_within(documents: Documents, device: torch.device) -> Tensor:
    """Return the position of each token in its document, int64 [length]."""
    # Built on the device from numbers of the host: a copy of a tensor would wait for the device.
    lengths = [end - start for start, end in pairwise(documents)]
    return torch.cat([torch.arange(length, device=device) for length in lengths])


def _next_labels(labels: Tensor, documents: Documents) -> Tensor:
    """Return the next label of each position's document, [B, length]; -100 at a document's end."""
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    for end in documents[1:]:  # one at a time: an index list would be copied to the device
        if end:
            targets[:, end - 1] = IGNORED
    return targets

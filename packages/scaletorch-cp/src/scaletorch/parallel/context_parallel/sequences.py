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
from .attention import attention
from .cp_comms import ring_of
from .layouts.layout import named_layout
from .layouts.sharding import (
    DEFAULT,
    batch_shape,
    is_sequence,
    local_shard,
    shard_batch,
    unshard_sequence,
)
from .masks.documents import CU_SEQLENS, Documents, read_documents
from .models.settings import ActiveBatch, use_batch
from .models.transformers_attention import temporary_attention


class ShardedSequences:
    """The sequences of a batch, sharded over the ranks, with their layout and documents.

    Lengths that do not divide are padded internally. Nothing sees padding; it has no targets and is
    removed from results.

    Attributes:
        layout: The positions of each rank.
        documents: First positions of packed documents, and the length: (0, a, ..., length), or
            None.
        ring: The ranks.

    Example:
        >>> sequences = ShardedSequences(input_ids.shape[1])
        >>> mine = sequences.shard({"input_ids": input_ids, "labels": input_ids})
        >>> logits = model(mine["input_ids"], mine["position_ids"])  # calls sequences.attention
        >>> loss = F.cross_entropy(logits.mT, mine["labels"], reduction="sum")
        >>> sequences.loss(loss, (mine["labels"] != -100).sum()).backward()
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

        Raises:
            InvalidArgumentError: A length below 1, no such layout, or documents that do not
                ascend from 0 to the length.
            NotInGroupError: This rank is outside `group`.
            StateError: Several ranks, and neither a group nor a process group manager.
        """
        if length < 1:
            message = f"{describe_rank()}: sequences need a length of at least 1; it is {length}"
            raise InvalidArgumentError(message)
        self.ring = ring_of(group)
        self.layout = named_layout(layout, length, self.ring.size)
        self.documents = None if cu_seqlens is None else read_documents(cu_seqlens, length)

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
            message = (
                f"{describe_rank()}: these are sequences of {self.layout.length} positions, and "
                f"input_ids are {list(shape)}"
            )
            raise InvalidArgumentError(message)
        self._require_documents(batch)
        whole, documents = dict(batch), self._all_documents
        if whole.get("position_ids") is None:
            ids = _positions_within(documents, whole["input_ids"].device)
            whole["position_ids"] = ids.expand(shape)
        if whole.get("labels") is not None and not shifted:
            whole["labels"] = _next_labels(whole["labels"], documents)
        padded = {
            name: self._padded(name, value) if is_sequence(name, value, shape) else value
            for name, value in whole.items()
        }
        return shard_batch(padded, self.ring.group, layout=self.layout)

    def shard_tensor(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's shard of one whole tensor; `unshard` is the inverse.

        Args:
            x: The same on every rank, with all positions along `dim`; any dtype.
            dim: The sequence dim.

        Returns:
            A new tensor of length `padded length / N` along `dim`; padding is 0.

        Raises:
            InvalidArgumentError: No such dim, or one of another length than the sequences'.
        """
        length = self.layout.length
        if not -x.ndim <= dim < x.ndim or x.shape[dim] != length:
            message = (
                f"{describe_rank()}: these are sequences of {length} positions, and dim {dim} of "
                f"a tensor {list(x.shape)} has not as many"
            )
            raise InvalidArgumentError(message)
        dim %= x.ndim
        later_dims = [0, 0] * (x.ndim - 1 - dim)
        padded = F.pad(x, (*later_dims, 0, self.layout.padded_length - length))
        return local_shard(padded, dim, self.layout, self.ring.index).contiguous()

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """Run a model on these sequences within a context.

        Its attention ignores padding, and each position sees its own document only. Run forward and
        backward inside: backward may recompute attention.

        Args:
            model: The result of `apply_context_parallel` over the same ranks, or a module that
                contains it.

        Raises:
            StateError: No module of it is context parallel, or it runs inside other sequences.
            InvalidArgumentError: It is context parallel over other ranks.
        """
        batch, alone = ActiveBatch(self.layout, self._all_documents), self.ring.size == 1
        with use_batch(model, batch, self.ring), temporary_attention(model, enabled=alone):
            yield

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
        window: int | None = None,
        method: str = "auto",
    ) -> Tensor:
        """Attend to the whole sequence, each position to its own document: see `attention`.

        Args:
            q: This rank's queries [B, H, L, D] in float16, bfloat16, float32 or float64.
            k: This rank's keys [B, K, L, D]; K divides H.
            v: This rank's values [B, K, L, D].
            causal: Each position sees itself and those before it.
            scale: Factor of the scores; 1 / sqrt(D) by default.
            window: The number of positions that each one sees, up to itself.
            method: "ring", "all_gather", "ulysses", "hybrid", or "auto".

        Returns:
            The output [B, H, L, D] for this rank's queries; 0 for padding.

        Raises:
            InvalidArgumentError: Arguments that do not fit together, or an unknown method.
            MismatchError: The ranks' shapes, dtypes or options differ; raised on every rank.
        """
        return attention(
            q, k, v, causal=causal, scale=scale, window=window, cu_seqlens=self.documents,
            layout=self.layout, method=method, group=self.ring.group,
        )  # fmt: skip

    def loss(self, sum: Tensor, count: Tensor | int) -> Tensor:
        """Return the mean loss over all ranks' tokens, the same on every rank.

        Each rank's backward gives partial gradients: sum them over the ranks.

        Args:
            sum: Sum of this rank's token losses, 0-d floating point.
            count: Number of those tokens; may be 0.

        Returns:
            The sum over the count of all ranks; 0, with gradients of 0, if no rank has a token.
        """
        return mean_over(sum, count, self.ring.group if self.ring.size > 1 else None)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Gather the ranks' shards to the whole, in order and without padding, on every rank.

        Args:
            x: This rank's shard, of equal shape on all ranks; any dtype.
            dim: The sequence dim.

        Raises:
            InvalidArgumentError: No such dim, or one of another length than a rank's shard.
        """
        return unshard_sequence(x, dim, self.ring.group, layout=self.layout)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Return this rank's positions, int64 [L]; those at or beyond the length are padding."""
        return self.layout.positions(self.ring.index, device)

    @property
    def _all_documents(self) -> Documents:
        return self.documents or (0, self.layout.length)

    def _require_documents(self, batch: Mapping[str, Any]) -> None:
        own = self._all_documents
        for name in CU_SEQLENS:
            value = batch.get(name)
            if value is not None and (found := read_documents(value, own[-1])) != own:
                message = (
                    f"{describe_rank()}: the batch's {name} are {found}, and these sequences have "
                    f"documents {own}; pass them once, as ShardedSequences(..., cu_seqlens={name})"
                )
                raise InvalidArgumentError(message)

    def _padded(self, name: str, value: Tensor) -> Tensor:
        missing = self.layout.padded_length - self.layout.length
        return F.pad(value, (0, missing), value=IGNORED if name == "labels" else 0)


def _positions_within(documents: Documents, device: torch.device) -> Tensor:
    """Return the position of each token in its document, int64 [length]."""
    # Built on the device from numbers of the host: a copy of a tensor would wait for the device.
    lengths = [end - start for start, end in pairwise(documents)]
    return torch.cat([torch.arange(length, device=device) for length in lengths])


def _next_labels(labels: Tensor, documents: Documents) -> Tensor:
    """Return the target of each position: the next label of its own document.

    Args:
        labels: [B, length], each position's own label.
        documents: First positions of the documents, and the length.

    Returns:
        [B, length]; -100 at each document's end.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    for end in documents[1:]:  # one at a time: a list as an index would be copied to the device
        if end:
            targets[:, end - 1] = IGNORED
    return targets

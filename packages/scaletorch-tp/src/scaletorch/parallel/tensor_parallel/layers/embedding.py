"""The vocabulary-parallel embedding, and embeddings sharded by columns."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from ....dist.errors import InvalidArgumentError
from ...placement import Cut
from .base import Group, Memo, Options, TensorParallelLayer
from .linear import ColumnParallelLinear

_OF_ROWS = ("scale_grad_by_freq", "sparse", "max_norm")


class VocabParallelEmbedding(TensorParallelLayer):
    """`nn.Embedding` with rows sharded over the ranks; the output is full.

    A new layer holds its shard of the values that `nn.Embedding` draws in one process from that
    seed.

    Args:
        num_embeddings: Number of rows of the full table; if uneven, first ranks get one more.
        embedding_dim: Length of a row.
        padding_idx: As in `nn.Embedding`: a row that gets no gradient, zero at first.
        max_norm: As in `nn.Embedding`: rows of a larger norm are rescaled in place when looked up.
        norm_type: The p of that norm.
        group: Ranks of the tensor-parallel axis; None means that axis of the current manager.
        device: Where the parameters live.
        dtype: The parameters' dtype.

    Raises:
        InvalidArgumentError: `num_embeddings` is less than tp, or `padding_idx` is out of range.
    """

    plain_class = nn.Embedding
    sharded_size = "num_embeddings"
    shard_dims: ClassVar[dict[str, int]] = {"weight": 0}
    options: ClassVar[dict[str, bool]] = {}

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        *,
        group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise InvalidArgumentError(
                f"padding_idx {padding_idx} is not a row of a table of {num_embeddings}; "
                f"choose from {-num_embeddings} to {num_embeddings - 1}"
            )
        sizes = (num_embeddings, embedding_dim, padding_idx, max_norm, norm_type)
        draw = partial(nn.Embedding, *sizes, device=device, dtype=dtype)
        self._build(draw, num_embeddings, group, {})

    @classmethod
    def misfit(cls, module: nn.Module) -> str | None:
        """Return why `module` cannot become this layer, or None if it can."""
        used = [n for n in ("scale_grad_by_freq", "sparse") if getattr(module, n, None)]
        if used and type(module) is cls.plain_class:
            return f"it uses {', '.join(used)}, which is not supported on shards"
        return super().misfit(module)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up full rows: ids of any shape to [..., embedding_dim]."""
        self._check_parameters()
        if self.tp_size == 1:
            norm = self.max_norm, self.norm_type
            return functional.embedding(ids, self.weight, self.padding_idx, *norm)
        first = self._first
        last = first + self.shard_sizes[self.tp_rank]
        # Ids of other ranks look up row 0, which is then zeroed. An id that belongs to no rank
        # stays out of range on all of them and fails as in one process.
        elsewhere = ((ids >= 0) & (ids < first)) | ((ids >= last) & (ids < self.num_embeddings))
        if self.max_norm is not None:
            # Rescale only the rows that are looked up here; each row is on one rank.
            own = ids[(ids >= first) & (ids < last)] - first
            with torch.no_grad():
                torch.embedding_renorm_(self.weight, own, self.max_norm, self.norm_type)
        padding = self.padding_idx
        own_padding = padding is not None and first <= padding < last
        rows = functional.embedding(
            (ids - first).masked_fill(elsewhere, 0),
            self.weight,
            padding - first if own_padding and padding is not None else None,
        )
        return self._leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0))

    def extra_repr(self) -> str:
        """Return the full sizes and tp."""
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}, "
            f"tp={self.tp_size}"
        )


class ScaledVocabParallelEmbedding(VocabParallelEmbedding):
    """A vocabulary-parallel embedding whose rows are scaled by `embed_scale` (Gemma, BART)."""

    embed_scale: Tensor | float

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        """Return whether `module` is one, by name and structure, as transformers may be absent."""
        kind = type(module)
        named = kind.__name__.endswith("ScaledWordEmbedding") and kind.__bases__ == (nn.Embedding,)
        return named and isinstance(getattr(module, "embed_scale", None), Tensor | float | int)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up full rows and scale them: ids of any shape to [..., embedding_dim]."""
        scale = self.embed_scale
        rows = super().forward(ids)
        return rows * (scale.to(self.weight.dtype) if isinstance(scale, Tensor) else scale)


class ColumnParallelEmbedding(ColumnParallelLinear):
    """`nn.Embedding` with columns sharded over the ranks; each rank looks up its own.

    An example is T5's table of relative attention biases, [buckets, heads].
    """

    plain_class = nn.Embedding  # type: ignore[assignment]
    sharded_size = "embedding_dim"
    shard_dims: ClassVar[dict[str, int]] = {"weight": 1}

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        """Return whether `module` is torch's own embedding."""
        return type(module) is nn.Embedding

    @classmethod
    def misfit(cls, module: nn.Module) -> str | None:
        """Return why `module` cannot become this layer, or None if it can."""
        used = [n for n in _OF_ROWS if getattr(module, n, None)]
        if used and cls.takes(module):
            return f"it uses {', '.join(used)}, which is not supported on shards of rows"
        return super().misfit(module)

    def _shard(self, group: Group, memo: Memo, options: Options, cut: Cut) -> None:
        sizes = {"in_features": self.num_embeddings, "out_features": self.embedding_dim}
        vars(self).update(sizes, bias=None)
        super()._shard(group, memo, options, cut)

    def _matrix(self) -> Tensor:
        return self.weight.t()

    def forward(self, x: Tensor) -> Tensor:
        """Look up this rank's columns: ids of any shape to [..., embedding_dim / tp]."""
        self._check_parameters()
        return functional.embedding(x, self.operands()[0].t(), self.padding_idx)

    def extra_repr(self) -> str:
        """Return the full sizes and tp."""
        return f"{self.num_embeddings}, {self.embedding_dim}, tp={self.tp_size}"

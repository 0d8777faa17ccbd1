"""The column- and row-parallel linear layers and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ...placement import Cut, Invariant, Partial, Shard, convert
from ..regions.random import end_sharded_random
from ..regions.region import enter, overlapped_linear, sum_replicas
from ..regions.sequence_shares import SequenceShares, refuse_shard
from .base import Group, Memo, Options, TensorParallelLayer

_KINDS = (nn.Linear, NonDynamicallyQuantizableLinear)
_KIN = ("FalconLinear",)  # by name: its forward is equivalent to torch's


class _Linear(TensorParallelLayer):
    """The base of the column- and row-parallel layers."""

    plain_class = nn.Linear

    in_features: int
    out_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        """Return whether `module` is a linear layer."""
        kind = type(module)
        return kind in _KINDS or (kind.__bases__ == (nn.Linear,) and kind.__name__ in _KIN)

    def _matrix(self) -> Tensor:
        """Return this rank's weight as [out_features, in_features], one of them sharded."""
        return self.weight


class ColumnParallelLinear(_Linear):
    """`nn.Linear` with output features sharded over the ranks.

    A new layer holds its shard of the values that `nn.Linear` draws in one process from that seed.

    Args:
        in_features: Size of the input's last dim; every rank gets the same full input.
        out_features: Full size of the output's last dim; if uneven, first ranks get one more.
        bias: Whether there is a bias, sharded like the output.
        gather_output: All-gather the outputs, so that every rank returns the full output.
        async_all_reduce: In backward, all-reduce the input's gradient while computing the weight's;
            `apply_tensor_parallel` sets it. Compiled layers do not overlap.
        group: Ranks of the tensor-parallel axis; None means that axis of the current manager.
        device: Where the parameters live.
        dtype: The parameters' dtype.

    Raises:
        InvalidArgumentError: `out_features` is less than tp.
    """

    sharded_size = "out_features"
    replicable = True
    shard_dims: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}
    options: ClassVar[dict[str, bool]] = {"gather_output": False, "async_all_reduce": False}

    gather_output: bool
    async_all_reduce: bool
    lists: Sequence[SequenceShares] = ()  # of layers that divide sequences, if it is in none

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = False,
        async_all_reduce: bool = False,
        *,
        group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        draw = partial(nn.Linear, in_features, out_features, bias, device=device, dtype=dtype)
        options = {"gather_output": gather_output, "async_all_reduce": async_all_reduce}
        self._build(draw, out_features, group, options)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features / tp], or to the full output if gathered."""
        self._check_input(x, self.in_features)
        if self.tp_size == 1:
            return functional.linear(x, self._matrix(), self.bias)
        refuse_shard(x, self.lists)
        overlap = self.async_all_reduce and not torch.compiler.is_compiling()
        out = overlapped_linear(self, x) if overlap else None
        if out is None:
            x = enter(x, self.group, self.sequence, self.arrives)
            out = functional.linear(x, *self.operands())
        if not self.gather_output:
            return out
        joined = convert(out, Shard(-1, self.shard_sizes), self.returns, self.group)
        return joined if self._in_order else self.cut.arrange(joined, -1)

    def operands(self) -> tuple[Tensor, Tensor | None]:
        """Return this rank's weight [out / tp, in] and bias [out / tp]; gradients sum replicas."""
        weight, bias = self._matrix(), self.bias
        if not self._replicated:
            return weight, bias
        where = self.cut, self.tp_rank, self.group
        return sum_replicas(weight, *where), None if bias is None else sum_replicas(bias, *where)


class RowParallelLinear(_Linear):
    """`nn.Linear` with input features sharded over the ranks; the output is full.

    A new layer holds its shard of the values that `nn.Linear` draws in one process from that seed.

    Args:
        in_features: Full size of the input's last dim; if uneven, first ranks get one more.
        out_features: Size of the output's last dim.
        bias: Whether there is a bias: replicated, added once.
        input_is_parallel: Whether the input is this rank's shard, as from a column-parallel layer;
            otherwise it is full and the layer cuts it.
        group: As in `ColumnParallelLinear`, and so are `device` and `dtype`.

    Raises:
        InvalidArgumentError: `in_features` is less than tp.
    """

    sharded_size = "in_features"
    shard_dims: ClassVar[dict[str, int]] = {"weight": 1}
    options: ClassVar[dict[str, bool]] = {"input_is_parallel": True}

    input_is_parallel: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        draw = partial(nn.Linear, in_features, out_features, bias, device=device, dtype=dtype)
        self._build(draw, in_features, group, {"input_is_parallel": input_is_parallel})

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features / tp], or the full input, to [..., out_features]."""
        own = self.shard_sizes[self.tp_rank]
        self._check_input(x, own if self.input_is_parallel else self.in_features)
        if self.tp_size == 1:
            return functional.linear(x, self._matrix(), self.bias)
        if not self.input_is_parallel:
            arrives = self.arrives or Invariant()
            x = convert(x, arrives, Shard(-1, self.shard_sizes), self.group)
        out = functional.linear(x, self._matrix())
        if self.sequence is None:
            out = convert(out, Partial(), self.returns, self.group)
            end_sharded_random()  # activations are full after this layer
        else:
            out = self.sequence.leave(out)
        bias: Tensor | None = self.bias
        # Under autocast the output has a narrower dtype than the bias; keep it.
        return out if bias is None else out + bias.to(out.dtype)


class Transposed(TensorParallelLayer):
    """Mixin, before a linear class, for the Conv1D of transformers, whose weight is [in, out]."""

    nx: int
    nf: int
    weight: nn.Parameter

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        """Return whether `module` is a Conv1D, by name and shape, as transformers may be absent."""
        sizes = getattr(module, "nx", None), getattr(module, "nf", None)
        weight = module._parameters.get("weight")
        return type(module).__name__ == "Conv1D" and weight is not None and weight.shape == sizes

    def _matrix(self) -> Tensor:
        return self.weight.t()

    def _shard(self, group: Group, memo: Memo, options: Options, cut: Cut) -> None:
        vars(self).update(in_features=self.nx, out_features=self.nf)
        super()._shard(group, memo, options, cut)


class ColumnParallelConv1D(Transposed, ColumnParallelLinear):
    """A column-parallel Conv1D, with weight [in_features, out_features / tp]."""

    sharded_size = "nf"
    shard_dims: ClassVar[dict[str, int]] = {"weight": 1, "bias": 0}


class RowParallelConv1D(Transposed, RowParallelLinear):
    """A row-parallel Conv1D, with weight [in_features / tp, out_features]."""

    sharded_size = "nx"
    shard_dims: ClassVar[dict[str, int]] = {"weight": 0}


def row_options(module: nn.Module) -> str | None:
    """Return why the options of an embedding cannot be kept on shards, or None if they can."""
    options = ("max_norm", "scale_grad_by_freq", "sparse")
    used = [name for name in options if getattr(module, name, None)]
    if used and isinstance(module, nn.Embedding):
        return f"it uses {', '.join(used)}, which is not supported on shards"
    return None


class VocabParallelEmbedding(TensorParallelLayer):
    """`nn.Embedding` with rows sharded over the ranks; the output is full.

    A new layer holds its shard of the values that `nn.Embedding` draws with that seed.

    Args:
        num_embeddings: Number of rows of the full table; if uneven, first ranks get one more.
        embedding_dim: Length of a row.
        padding_idx: As in `nn.Embedding`: a row that gets no gradient, zero at first.
        group: As in `ColumnParallelLinear`, and so are `device` and `dtype`.

    Raises:
        InvalidArgumentError: `num_embeddings` is less than tp.
        AssertionError: `padding_idx` is not a row, as in `nn.Embedding`.
    """

    plain_class = nn.Embedding
    sharded_size = "num_embeddings"
    shard_dims: ClassVar[dict[str, int]] = {"weight": 0}

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = (num_embeddings, embedding_dim, padding_idx)
        draw = partial(nn.Embedding, *sizes, device=device, dtype=dtype)
        self._build(draw, num_embeddings, group, {})

    @classmethod
    def misfit(cls, module: nn.Module) -> str | None:
        """Return why `module` cannot become this layer, or None if it can."""
        return row_options(module) or super().misfit(module)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up full rows: ids of any shape to [..., embedding_dim]."""
        self._check_parameters()
        if self.tp_size == 1:
            return functional.embedding(ids, self.weight, self.padding_idx)
        first = sum(self.shard_sizes[: self.tp_rank])
        last = first + self.shard_sizes[self.tp_rank]
        # Ids of other ranks look up row 0, which is then zeroed. An id that belongs to no rank
        # stays out of range on all of them and fails as in one process.
        elsewhere = ((ids >= 0) & (ids < first)) | ((ids >= last) & (ids < self.num_embeddings))
        padding = self.padding_idx
        own_padding = None if padding is None or not first <= padding < last else padding - first
        own_ids = (ids - first).masked_fill(elsewhere, 0)
        rows = functional.embedding(own_ids, self.weight, own_padding)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
        return convert(rows, Partial(), self.returns, self.group)


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

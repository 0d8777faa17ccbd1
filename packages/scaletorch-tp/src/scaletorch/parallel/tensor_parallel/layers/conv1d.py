"""Shards of the transposed linear layer that transformers calls Conv1D: its weight is [in, out]."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from ..cuts.cut import Cut
from .base import Group, Memo, Options, TensorParallelLayer
from .linear import ColumnParallelLinear, RowParallelLinear


class Transposed(TensorParallelLayer):
    """What both layers have in common, before the class of the layer for torch's own linear."""

    nx: int
    nf: int
    weight: nn.Parameter

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        """Return whether `module` is a Conv1D by name and structure: its library may be absent."""
        sizes = getattr(module, "nx", None), getattr(module, "nf", None)
        weight = module._parameters.get("weight")
        return type(module).__name__ == "Conv1D" and weight is not None and weight.shape == sizes

    def _matrix(self) -> Tensor:
        return self.weight.t()

    def _shard(self, group: Group, memo: Memo, options: Options, cut: Cut) -> None:
        vars(self).update(in_features=self.nx, out_features=self.nf)
        super()._shard(group, memo, options, cut)


class ColumnParallelConv1D(Transposed, ColumnParallelLinear):
    """A column-parallel layer whose weight is [in_features, out_features / tp]."""

    sharded_size = "nf"
    shard_dims: ClassVar[dict[str, int]] = {"weight": 1, "bias": 0}


class RowParallelConv1D(Transposed, RowParallelLinear):
    """A row-parallel layer whose weight is [in_features / tp, out_features]."""

    sharded_size = "nx"
    shard_dims: ClassVar[dict[str, int]] = {"weight": 0}

"""Faults of tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...parallel.pg_manager import get_process_group_manager
from .mutant import Catalogue

TENSOR = Catalogue("parallel.tensor_parallel")
fault = TENSOR.fault


@fault("layers:reduce", layout="1x1x1x2")
def partial_sums_not_reduced(reduce: Any) -> Any:
    """Row-parallel and embedding outputs miss their all-reduce."""
    return lambda x, _group: x


@fault("layers:reduce", layout="1x1x1x2")
def partial_sums_reduced_twice(reduce: Any) -> Any:
    """Row-parallel and embedding outputs are all-reduced twice."""
    return lambda x, group: reduce(reduce(x, group), group)


@fault("region:copy", layout="1x1x1x2")
def input_gradient_not_reduced(copy: Any) -> Any:
    """A column-parallel layer's input gradient misses its all-reduce."""
    return lambda x, _group: x


@fault("region:copy", layout="1x1x1x2")
def input_gradient_reduced_twice(copy: Any) -> Any:
    """A column-parallel layer's input gradient is all-reduced twice."""
    return lambda x, group: copy(copy(x, group), group)


@fault("region:copy", layout="2x1x1x2")
def input_gradient_over_wrong_axis(copy: Any) -> Any:
    """A column-parallel layer's input gradient is all-reduced over dp in place of tp."""

    def over_dp(x: Tensor, _group: Any) -> Any:
        manager = get_process_group_manager()
        return x if manager is None else copy(x, manager.dp_group)

    return over_dp


@fault("layers:RowParallelLinear.forward", layout="1x1x1x2")
def row_bias_on_every_rank(forward: Any) -> Any:
    """Every rank adds the row-parallel bias before the sum."""
    return lambda self, x: forward(self, x) + (self.tp_size - 1) * self.bias


@fault("layers:VocabParallelEmbedding.forward", layout="1x1x1x2")
def vocabulary_off_by_one(forward: Any) -> Any:
    """Ranks but the first look up the row after the one that is meant."""

    def shifted(self: Any, ids: Tensor) -> Any:
        next_row = (ids + 1).clamp(max=self.num_embeddings - 1)
        return forward(self, torch.where(ids >= self.shard_sizes[0], next_row, ids))

    return shifted


@fault("layers:VocabParallelEmbedding.forward", layout="1x1x1x2")
def padding_row_gets_gradient(forward: Any) -> Any:
    """The padding row is trained like any other."""

    def forgetful(self: Any, ids: Tensor) -> Any:
        padding, self.padding_idx = self.padding_idx, None
        try:
            return forward(self, ids)
        finally:
            self.padding_idx = padding

    return forgetful


@fault("sum_grad:copy", layout="1x1x1x2")
def head_norm_gradient_not_summed(copy: Any) -> Any:
    """A norm of each rank's own heads keeps the gradient of these heads alone."""
    return lambda x, _group: x


@fault("layers:gather", layout="1x1x1x2")
def gathered_logits_gradient_summed(gather: Any) -> Any:
    """The gradient of joined outputs is summed over ranks that computed the same loss."""

    def doubled(x: Tensor, dim: int, group: Any, sizes: Any) -> Any:
        x = gather(x, dim, group, sizes=sizes)
        return x * len(sizes) - x.detach() * (len(sizes) - 1)

    return doubled


@fault("base:take_shard", layout="1x1x1x2")
def row_shards_in_wrong_order(take_shard: Any) -> Any:
    """A row-parallel weight's shards are dealt in another order than its inputs."""
    return lambda x, dim, sizes, rank: take_shard(x, dim, sizes, (rank + dim) % len(sizes))


@fault("base:take_shard", layout="1x1x1x2", model="sharded")
def shards_initialised_alike(take_shard: Any) -> Any:
    """Every rank draws the same shard of a new layer."""
    return lambda x, dim, sizes, _rank: take_shard(x, dim, sizes, 0)


@fault("base:TensorParallelLayer._shard_parameter", layout="1x1x1x2")
def tied_parameters_sharded_apart(shard: Any) -> Any:
    """A tied embedding and head become two parameters when they are sharded."""
    return lambda self, name, dim, whole, _memo: shard(self, name, dim, whole, {})


@fault("random:get_rank", layout="1x1x1x2")
def dropout_alike_on_shards(get_rank: Any) -> Any:
    """Ranks drop the same elements of activations of which each holds another part."""
    return lambda _group: 0

"""Faults of tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scaletorch.dist.functional import split
from scaletorch.parallel.pg_manager import get_process_group_manager
from scaletorch.parallel.placement import Invariant, Partial, Shard

from .mutant import Catalogue

TENSOR = Catalogue("parallel.tensor_parallel", "1x1x1x2")
fault = TENSOR.fault
COLUMN = "backward: *.q_proj | *.k_proj | *.v_proj | *.gate_proj | *.up_proj | lm_head"
ROW = "forward: *.o_proj | *.down_proj"
CUT = "start: *.o_proj | *.down_proj"
SUMMED = "forward: embed_tokens | *.o_proj | *.down_proj"


@fault("layers.base:convert", born=SUMMED)
def partial_sums_not_reduced(convert: Any) -> Any:
    """Row-parallel and embedding outputs miss their all-reduce."""
    return lambda x, src, *to: x if src == Partial() else convert(x, src, *to)


@fault("layers.base:convert", born=SUMMED)
def partial_sums_reduced_twice(convert: Any) -> Any:
    """Row-parallel and embedding outputs are all-reduced twice."""

    def twice(x: Tensor, src: Any, *to: Any) -> Any:
        once = convert(x, src, *to)
        return convert(once, src, *to) if src == Partial() else once

    return twice


@fault("regions.region:send", born=COLUMN)
def input_gradient_not_reduced(send: Any) -> Any:
    """A column-parallel layer's input gradient misses its all-reduce."""
    return lambda grad, _group, _sizes: lambda: grad


@fault("regions.region:send", born=COLUMN)
def input_gradient_reduced_twice(send: Any) -> Any:
    """A column-parallel layer's input gradient is all-reduced twice."""
    return lambda grad, group, sizes: send(send(grad, group, sizes)(), group, sizes)


@fault("regions.region:send", layout="2x1x1x2", born=COLUMN)
def input_gradient_over_wrong_axis(send: Any) -> Any:
    """A column-parallel layer's input gradient is all-reduced over dp in place of tp."""

    def over_dp(grad: Tensor, _group: Any, sizes: Any) -> Any:
        manager = get_process_group_manager()
        return send(grad, None if manager is None else manager.dp_group, sizes)

    return over_dp


@fault("regions.region:weight_grad", born=COLUMN)
def late_weight_gradient_incomplete(weight_grad: Any) -> Any:
    """A weight's gradient, computed while its input's travels, leaves out a sequence."""
    return lambda products: weight_grad([(g[1:], x[1:]) for g, x in products])


@fault("layers.linear:RowParallelLinear.forward", born=ROW)
def row_bias_on_every_rank(forward: Any) -> Any:
    """Every rank adds the row-parallel bias before the sum."""
    return lambda self, x: forward(self, x) + (self.tp_size - 1) * self.bias


@fault("layers.linear:VocabParallelEmbedding.forward", born="forward: embed_tokens")
def vocabulary_off_by_one(forward: Any) -> Any:
    """Ranks but the first look up the row after the one that is meant."""

    def shifted(self: Any, ids: Tensor) -> Any:
        next_row = (ids + 1).clamp(max=self.num_embeddings - 1)
        return forward(self, torch.where(ids >= self.shard_sizes[0], next_row, ids))

    return shifted


@fault("layers.linear:VocabParallelEmbedding.forward", born="backward: embed_tokens")
def padding_row_gets_gradient(forward: Any) -> Any:
    """The padding row is trained like any other."""

    def forgetful(self: Any, ids: Tensor) -> Any:
        padding, self.padding_idx = self.padding_idx, None
        try:
            return forward(self, ids)
        finally:
            self.padding_idx = padding

    return forgetful


SUMS = Catalogue("compose", "1x1x1x2")
HEAD_NORMS = "synchronisation: gradients"


@SUMS.fault("partial_gradients:_sum", born=HEAD_NORMS)
def partial_gradients_not_summed(_sum: Any) -> Any:
    """What each rank has a term of, such as the gradient of its heads' norm, stays as it is."""
    return lambda _known, _model, _manager: None


@SUMS.fault("partial_gradients:_sort", born=HEAD_NORMS)
def whole_gradients_summed(sort: Any) -> Any:
    """Gradients that every rank has whole are summed over the ranks, too."""

    def all_of_them(known: Any) -> None:
        sort(known)
        known.names = [*known.whole]

    return all_of_them


@fault("layers.base:convert", born="backward: lm_head")
def gathered_logits_gradient_summed(convert: Any) -> Any:
    """The gradient of joined outputs is summed over ranks that computed the same loss."""

    def doubled(x: Tensor, src: Any, *to: Any) -> Any:
        x = convert(x, src, *to)
        if not isinstance(src, Shard):
            return x
        return x * len(src.sizes or ()) - x.detach() * (len(src.sizes or ()) - 1)

    return doubled


def _as_rank(own: Any, choose: Any) -> Any:
    """Cut a parameter as another rank would."""

    def other(self: Any, whole: Tensor, dim: int, *cut: Any) -> Any:
        rank, self.tp_rank = self.tp_rank, choose(self.tp_rank, self.tp_size, dim)
        try:
            return own(self, whole, dim, *cut)
        finally:
            self.tp_rank = rank

    return other


@fault("layers.base:TensorParallelLayer._own", born=ROW.replace("forward", "start"))
def row_shards_in_wrong_order(own: Any) -> Any:
    """A row-parallel weight's shards are dealt in another order than its inputs."""
    return _as_rank(own, lambda rank, size, dim: (rank + dim) % size)


@fault("layers.base:TensorParallelLayer._own", model="sharded", born="start: up | down")
def shards_initialised_alike(own: Any) -> Any:
    """Every rank draws the same shard of a new layer."""
    return _as_rank(own, lambda _rank, _size, _dim: 0)


@fault(
    "layers.base:TensorParallelLayer._shard_parameter",
    born="backward: embed_tokens | lm_head ; synchronisation: embed_tokens.weight | lm_head.weight",
)
def tied_parameters_sharded_apart(shard: Any) -> Any:
    """A tied embedding and head become two parameters when they are sharded."""
    return lambda self, name, dim, whole, _memo: shard(self, name, dim, whole, {})


@fault("regions.random:get_rank", born="forward: *.mlp.dropout")
def dropout_alike_on_shards(get_rank: Any) -> Any:
    """Ranks drop the same elements of activations of which each holds another part."""
    return lambda _group: 0


@fault(
    "regions.region:sum_parts",
    layout="1x1x1x4",
    born="backward: *.k_proj | *.v_proj ; synchronisation: *.k_proj.* | *.v_proj.*",
)
def replicated_heads_not_summed(sum_parts: Any) -> Any:
    """Ranks that share a key head each keep the gradient of their own queries."""
    return lambda x, _cut, _rank, _group: x


SEQUENCE = {"model": "shared", "sequence_parallel": "on"}


@SUMS.fault("partial_gradients:_sum", **SEQUENCE, born=HEAD_NORMS)
def gradients_of_shares_not_summed(_sum: Any) -> Any:
    """What works on a share of the sequence keeps the gradient of this share."""
    return lambda _known, _model, _manager: None


@fault("regions.region:send", **SEQUENCE, born=COLUMN)
def sequence_gradient_not_scattered(send: Any) -> Any:
    """The gradient at a region's beginning is cut, and the ranks' parts are not summed."""
    return lambda grad, group, sizes: lambda: split(grad, -2, group, sizes=sizes)


@fault("regions.sequence_shares:convert", **SEQUENCE, born=SUMMED)
def sequence_partial_sums_not_reduced(convert: Any) -> Any:
    """A region's partial results are cut, and not summed."""
    return lambda x, src, *to: convert(x, Invariant() if src == Partial() else src, *to)


@fault("regions.random:get_rank", **SEQUENCE, born="forward: *.dropout")
def dropout_alike_on_sequence_shares(get_rank: Any) -> Any:
    """Ranks drop the same elements of their shares of the sequence."""
    return lambda _group: 0

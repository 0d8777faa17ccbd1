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


@fault("layers.linear:convert", born=SUMMED)
def partial_sums_not_reduced(convert: Any, x: Any, src: Any, *to: Any) -> Any:
    """Row-parallel and embedding outputs miss their all-reduce."""
    return x if src == Partial() else convert(x, src, *to)


@fault("layers.linear:convert", born=SUMMED)
def partial_sums_reduced_twice(convert: Any, x: Tensor, src: Any, *to: Any) -> Any:
    """Row-parallel and embedding outputs are all-reduced twice."""
    once = convert(x, src, *to)
    if src == Partial():  # the graph of a second sum would be refused
        once.data = convert(once.detach(), src, *to)
    return once


@fault("regions.region:send", born=COLUMN)
def input_gradient_not_reduced(send: Any, grad: Any, _group: Any, _sizes: Any) -> Any:
    """A column-parallel layer's input gradient misses its all-reduce."""
    return lambda: grad


@fault("regions.region:send", born=COLUMN)
def input_gradient_reduced_twice(send: Any, grad: Any, group: Any, sizes: Any) -> Any:
    """A column-parallel layer's input gradient is all-reduced twice."""
    return send(send(grad, group, sizes)(), group, sizes)


@fault("regions.region:send", layout="2x1x1x2", born=COLUMN)
def input_gradient_over_wrong_axis(send: Any, grad: Tensor, _group: Any, sizes: Any) -> Any:
    """A column-parallel layer's input gradient is all-reduced over dp in place of tp."""
    manager = get_process_group_manager()
    return send(grad, None if manager is None else manager.dp_group, sizes)


@fault("regions.region:weight_grad", born=COLUMN)
def late_weight_gradient_incomplete(weight_grad: Any, products: Any) -> Any:
    """A weight's gradient, computed while its input's travels, leaves out a sequence."""
    return weight_grad([(g[1:], x[1:]) for g, x in products])


@fault("layers.linear:RowParallelLinear.forward", born=ROW)
def row_bias_on_every_rank(forward: Any, self: Any, x: Any) -> Any:
    """Every rank adds the row-parallel bias before the sum."""
    return forward(self, x) + (self.tp_size - 1) * self.bias


@fault("layers.linear:VocabParallelEmbedding.forward", born="forward: embed_tokens")
def vocabulary_off_by_one(forward: Any, self: Any, ids: Tensor) -> Any:
    """Ranks but the first look up the row after the one that is meant."""
    next_row = (ids + 1).clamp(max=self.num_embeddings - 1)
    return forward(self, torch.where(ids >= self.shard_sizes[0], next_row, ids))


@fault("layers.linear:VocabParallelEmbedding.forward", born="backward: embed_tokens")
def padding_row_gets_gradient(forward: Any, self: Any, ids: Tensor) -> Any:
    """The padding row is trained like any other."""
    padding, self.padding_idx = self.padding_idx, None
    try:
        return forward(self, ids)
    finally:
        self.padding_idx = padding


SUMS = Catalogue("compose", "1x1x1x2")
HEAD_NORMS = "synchronisation: gradients"


@SUMS.fault("gradients:_sum", born=HEAD_NORMS)
def partial_gradients_not_summed(_sum: Any, _known: Any, _model: Any, _manager: Any) -> Any:
    """What each rank has a term of, such as the gradient of its heads' norm, stays as it is."""
    return None


@SUMS.fault("gradients:_sort", born=HEAD_NORMS)
def whole_gradients_summed(sort: Any, known: Any) -> None:
    """Gradients that every rank has whole are summed over the ranks, too."""
    sort(known)
    known.names = [*known.whole]


@fault("layers.linear:convert", born="backward: lm_head")
def gathered_logits_gradient_summed(convert: Any, x: Tensor, src: Any, *to: Any) -> Any:
    """The gradient of joined outputs is summed over ranks that computed the same loss."""
    x = convert(x, src, *to)
    if not isinstance(src, Shard):
        return x
    return x * len(src.sizes or ()) - x.detach() * (len(src.sizes or ()) - 1)


def _as_rank(rank: int, own: Any, self: Any, *cut: Any) -> Any:
    """Cut a parameter as another rank would."""
    kept, self.tp_rank = self.tp_rank, rank
    try:
        return own(self, *cut)
    finally:
        self.tp_rank = kept


@fault("layers.base:TensorParallelLayer._own", born=ROW.replace("forward", "start"))
def row_shards_in_wrong_order(own: Any, self: Any, whole: Tensor, dim: int, *cut: Any) -> Any:
    """A row-parallel weight's shards are dealt in another order than its inputs."""
    return _as_rank((self.tp_rank + dim) % self.tp_size, own, self, whole, dim, *cut)


@fault("layers.base:TensorParallelLayer._own", model="sharded", born="start: up | down")
def shards_initialised_alike(own: Any, self: Any, *cut: Any) -> Any:
    """Every rank draws the same shard of a new layer."""
    return _as_rank(0, own, self, *cut)


@fault(
    "layers.base:TensorParallelLayer._shard_parameter",
    born="backward: embed_tokens | lm_head ; synchronisation: embed_tokens.weight | lm_head.weight",
)
def tied_parameters_sharded_apart(
    shard: Any, self: Any, name: Any, dim: Any, whole: Any, _memo: Any
) -> Any:
    """A tied embedding and head become two parameters when they are sharded."""
    return shard(self, name, dim, whole, {})


@fault("regions.random:get_rank")
def dropout_alike_on_shards(get_rank: Any, _group: Any) -> Any:
    """Ranks drop the same elements of activations of which each holds another part."""
    return 0


@fault(
    "regions.region:sum_parts",
    layout="1x1x1x4",
    born="backward: *.k_proj | *.v_proj ; synchronisation: *.k_proj.* | *.v_proj.*",
)
def replicated_heads_not_summed(sum_parts: Any, x: Any, _cut: Any, _rank: Any, _group: Any) -> Any:
    """Ranks that share a key head each keep the gradient of their own queries."""
    return x


SEQUENCE = {"model": "shared", "sequence_parallel": "on"}


@SUMS.fault("gradients:_sum", **SEQUENCE, born=HEAD_NORMS)
def gradients_of_shares_not_summed(_sum: Any, _known: Any, _model: Any, _manager: Any) -> Any:
    """What works on a share of the sequence keeps the gradient of this share."""
    return None


@fault("regions.region:send", **SEQUENCE, born=COLUMN)
def sequence_gradient_not_scattered(send: Any, grad: Any, group: Any, sizes: Any) -> Any:
    """The gradient at a region's beginning is cut, and the ranks' parts are not summed."""
    if sizes is None:  # of the head, behind the layers
        return send(grad, group, sizes)
    return lambda: split(grad, -2, group, sizes=sizes)


@fault("regions.sequence_shares:convert", **SEQUENCE, born=SUMMED)
def sequence_partial_sums_not_reduced(convert: Any, x: Any, src: Any, *to: Any) -> Any:
    """A region's partial results are cut, and not summed."""
    return convert(x, Invariant() if src == Partial() else src, *to)


@fault("regions.random:get_rank", **SEQUENCE)
def dropout_alike_on_sequence_shares(get_rank: Any, _group: Any) -> Any:
    """Ranks drop the same elements of their shares of the sequence."""
    return 0

"""Tensor parallelism: sharded layers, and plans that shard whole models."""

from ._version import __version__
from .cross_entropy import vocab_parallel_cross_entropy
from .layers.base import TensorParallelLayer
from .layers.linear import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from .plans.plan import STYLES, Plan, Style
from .plans.suggest import suggest_plan
from .regions.random import common_random, sharded_random
from .state import (
    PiecesTensor,
    gather_state_dict,
    gather_tensors,
    load_full_state_dict,
    shard_dims,
    sharded_state_dict,
    split_by_owner,
    take_own,
)
from .styles import Divide, Fused, PerHead, SharedTail, Slices, Stacked
from .tensor_parallel import ExplainedParameter, Explanation, apply_tensor_parallel, explain
from .tp_comms import (
    CopyToModelParallelRegion,
    GatherFromModelParallelRegion,
    ReduceFromModelParallelRegion,
    linear_with_all_reduce,
    linear_with_async_all_reduce,
)

__all__ = [
    "STYLES",
    "ColumnParallelLinear",
    "CopyToModelParallelRegion",
    "Divide",
    "ExplainedParameter",
    "Explanation",
    "Fused",
    "GatherFromModelParallelRegion",
    "PerHead",
    "PiecesTensor",
    "Plan",
    "ReduceFromModelParallelRegion",
    "RowParallelLinear",
    "SharedTail",
    "Slices",
    "Stacked",
    "Style",
    "TensorParallelLayer",
    "VocabParallelEmbedding",
    "__version__",
    "apply_tensor_parallel",
    "common_random",
    "explain",
    "gather_state_dict",
    "gather_tensors",
    "linear_with_all_reduce",
    "linear_with_async_all_reduce",
    "load_full_state_dict",
    "shard_dims",
    "sharded_random",
    "sharded_state_dict",
    "split_by_owner",
    "suggest_plan",
    "take_own",
    "vocab_parallel_cross_entropy",
]

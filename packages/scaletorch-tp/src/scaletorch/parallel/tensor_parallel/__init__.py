"""Tensor parallelism: layers of which each rank holds a shard, and plans for whole models."""

from ._version import __version__
from .base import TensorParallelLayer
from .layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from .plan import FAMILIES, STYLES, Divide, Family, Plan, Style
from .random import common_random, sharded_random
from .state import gather_state_dict, gather_tensors, load_full_state_dict, shard_dims
from .tensor_parallel import apply_tensor_parallel
from .tp_comms import (
    CopyToModelParallelRegion,
    GatherFromModelParallelRegion,
    ReduceFromModelParallelRegion,
    linear_with_all_reduce,
    linear_with_async_all_reduce,
    merge_first_two_dims,
    split_tensor_along_last_dim,
)

__all__ = [
    "FAMILIES",
    "STYLES",
    "ColumnParallelLinear",
    "CopyToModelParallelRegion",
    "Divide",
    "Family",
    "GatherFromModelParallelRegion",
    "Plan",
    "ReduceFromModelParallelRegion",
    "RowParallelLinear",
    "Style",
    "TensorParallelLayer",
    "VocabParallelEmbedding",
    "__version__",
    "apply_tensor_parallel",
    "common_random",
    "gather_state_dict",
    "gather_tensors",
    "linear_with_all_reduce",
    "linear_with_async_all_reduce",
    "load_full_state_dict",
    "merge_first_two_dims",
    "shard_dims",
    "sharded_random",
    "split_tensor_along_last_dim",
]

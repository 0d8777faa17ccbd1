"""Context parallelism: sharded sequences, and exact attention over all of their positions."""

from ._version import __version__
from .attention import attention
from .context_parallel import (
    apply_context_parallel,
    ring_attention,
    update_rope_for_context_parallel,
)
from .cp_comms import ContextCommunicate
from .kernels.block import update_out_and_lse
from .layouts import LAYOUTS, Layout, contiguous, stripe, zigzag
from .methods import choose_method
from .sequences import ShardedSequences
from .sharding import positions, shard_batch, shard_sequence, unshard_sequence

__all__ = [
    "LAYOUTS",
    "ContextCommunicate",
    "Layout",
    "ShardedSequences",
    "__version__",
    "apply_context_parallel",
    "attention",
    "choose_method",
    "contiguous",
    "positions",
    "ring_attention",
    "shard_batch",
    "shard_sequence",
    "stripe",
    "unshard_sequence",
    "update_out_and_lse",
    "update_rope_for_context_parallel",
    "zigzag",
]

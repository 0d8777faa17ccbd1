"""Context parallelism: sharded sequences, and exact attention over all of their positions."""

from ._version import __version__
from .attention import attention
from .context_parallel import (
    apply_context_parallel,
    ring_attention,
    update_rope_for_context_parallel,
)
from .cp_comms import ContextCommunicate
from .kernels import update_out_and_lse
from .layouts.layout import LAYOUTS, Layout, contiguous, stripe, zigzag
from .layouts.sharding import positions, shard_batch, shard_sequence, unshard_sequence
from .masks.mask import Mask
from .methods.choose import choose_method, volumes
from .sequences import ShardedSequences

__all__ = [
    "LAYOUTS",
    "ContextCommunicate",
    "Layout",
    "Mask",
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
    "volumes",
    "zigzag",
]

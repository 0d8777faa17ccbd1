"""Context parallelism: sequences in shards, exact attention over all of them."""

from ._version import __version__
from .blocks import update_out_and_lse
from .context_parallel import (
    apply_context_parallel,
    ring_attention,
    update_rope_for_context_parallel,
)
from .cp_comms import ContextCommunicate
from .ring import RingAttention
from .sharding import positions, shard_batch, shard_sequence, unshard_sequence

__all__ = [
    "ContextCommunicate",
    "RingAttention",
    "__version__",
    "apply_context_parallel",
    "positions",
    "ring_attention",
    "shard_batch",
    "shard_sequence",
    "unshard_sequence",
    "update_out_and_lse",
    "update_rope_for_context_parallel",
]

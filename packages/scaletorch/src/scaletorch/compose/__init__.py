"""The four strategies together: one call that composes them, one training step, whole tensors."""

from ._version import __version__
from .batches import shard_global_batch
from .loss import token_loss_sum
from .norm import clip_grad_norm_, global_grad_norm, nonfinite_gradients
from .parallelize import parallelize
from .randomness import seed_ranks
from .recompute import recompute_layers
from .replicas import check_replicas
from .state import full_gradients, full_state_dict, local_gradients
from .step import train_step

__all__ = [
    "__version__",
    "check_replicas",
    "clip_grad_norm_",
    "full_gradients",
    "full_state_dict",
    "global_grad_norm",
    "local_gradients",
    "nonfinite_gradients",
    "parallelize",
    "recompute_layers",
    "seed_ranks",
    "shard_global_batch",
    "token_loss_sum",
    "train_step",
]

"""Combine the parallel strategies: parallelize a model, train a step, gather whole tensors."""

from ._version import __version__
from .batches import shard_global_batch
from .digests import check_replicas
from .draws import rows_of_step, seed_ranks
from .evaluate import eval_step, forward_step
from .experts import count_routing, move_biases
from .gradients import clip_grad_norm_, global_grad_norm, nonfinite_gradients
from .loss import (
    last_token,
    log_probs,
    sequence_sums,
    token_log_probs,
    token_loss_sum,
    token_losses,
    vocabulary_sums,
)
from .parallelize import parallelize
from .recompute import recompute_layers
from .state import full_gradients, full_state_dict, local_gradients
from .step import rehearse, train_step
from .whole_matrices import whole_matrices

__all__ = [
    "__version__",
    "check_replicas",
    "clip_grad_norm_",
    "count_routing",
    "eval_step",
    "forward_step",
    "full_gradients",
    "full_state_dict",
    "global_grad_norm",
    "last_token",
    "local_gradients",
    "log_probs",
    "move_biases",
    "nonfinite_gradients",
    "parallelize",
    "recompute_layers",
    "rehearse",
    "rows_of_step",
    "seed_ranks",
    "sequence_sums",
    "shard_global_batch",
    "token_log_probs",
    "token_loss_sum",
    "token_losses",
    "train_step",
    "vocabulary_sums",
    "whole_matrices",
]

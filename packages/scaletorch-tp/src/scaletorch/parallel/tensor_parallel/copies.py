"""Copies of modules of which a rank holds its part."""

from __future__ import annotations

from torch import nn

from ...dist.errors import StateError
from ..pg_manager import describe_rank


def not_pickled(module: nn.Module) -> StateError:
    """Return the error of a module that `pickle`, or `torch.save`, was asked to write down."""
    return StateError(
        f"{describe_rank()}: a {type(module).__name__} cannot be pickled, as tensor parallelism "
        "ties it to this rank's process group: save a state_dict, gather_state_dict(model) for "
        "the whole model's, and load it into a model made anew; copy.deepcopy works"
    )

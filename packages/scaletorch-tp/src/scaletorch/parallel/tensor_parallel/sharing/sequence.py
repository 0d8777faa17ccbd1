"""Sequence parallelism: between regions each rank holds a shard of every sequence.

A region begins with an all-gather and ends with a reduce-scatter instead of an all-reduce. They
send the same bytes, but norms, dropout and residuals work on 1/tp of the tokens and save 1/tp of
the activations. Source: https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ....dist import get_rank, get_world_size
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ...pg_manager.building import around_compiled
from ...placement import ModelView, modules_within, shard_sizes
from ..layers.base import TensorParallelLayer
from ..layers.heads import HeadParameters
from ..regions.overlap import DIM
from ..regions.random import sharded_random
from ..regions.region import Region
from ..regions.sequence_shares import SequenceShares, find_shares, shapes_explained
from ..regions.surround import Surrounded, own_class, surround
from .sequence_layers import SequenceLayer
from .whole_sequence import WholeSequence, mask_configs, whole_masks


class SequenceRoot(Surrounded):
    """Mixin of the model: records sequence lengths and uses this rank's random stream."""

    _sequence: SequenceShares | None = None  # a slice of an nn.Sequential has none
    _configs: Sequence[Any] = ()  # configs of transformers models
    _layered: bool = False  # sequences are full before and after the layers

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward."""
        if self._sequence is None:
            return super().forward(*args, **kwargs)
        # Only the ids are full, so only they give the length of the sequence.
        ids = _find_ids(args, kwargs)
        self._sequence.length = None if ids is None else ids.shape[-1]
        self._sequence.batch = 0 if ids is None else ids.shape[0]
        self._sequence.sharing = not self._layered
        if ids is not None and not self._layered and _lacks_positions(self, args, kwargs):
            # The model itself would count only the tokens of its shard.
            kwargs["position_ids"] = torch.arange(ids.shape[-1], device=ids.device)[None]
        with ExitStack() as stack:
            stack.enter_context(shapes_explained(own_class(self).__name__, self._sequence))
            stack.enter_context(whole_masks(self._configs, self._sequence))
            if self.training and not self._layered:  # else the layers do this
                stack.enter_context(sharded_random(self._tp_group))
            return super().forward(*args, **kwargs)


class SplitSequence(Surrounded):
    """Mixin of a replicated embedding: keeps only this rank's shard of its output sequence."""

    _sequence: SequenceShares

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward and return this rank's shard."""
        out, length = super().forward(*args, **kwargs), self._sequence.length
        if length is not None and out.shape[DIM] != length:
            raise InvalidArgumentError(
                f"{describe_rank()}: with sequence parallelism {own_class(self).__name__} must be "
                f"called with all {length} tokens' ids or positions, and returned a tensor of "
                f"shape {tuple(out.shape)}. If the model counts positions, style its layers "
                "'sequence_layer', else do without sequence parallelism"
            )
        return self._sequence.split(out)


def share_sequences(
    view: ModelView, group: ProcessGroup | None, whole: Sequence[nn.Module] = ()
) -> None:
    """Make a model with tensor-parallel layers sequence parallel, in place.

    Its regions all-gather and reduce-scatter, and replicated embeddings return shards. Modules in
    `whole` become `WholeSequence`; modules inside them do not change, since they work on full
    sequences. If the plan has `SequenceLayer` modules, all modules outside them work on full
    sequences too.
    """
    shares, model = SequenceShares(group), view.model
    layers = [module for module in view.names if isinstance(module, SequenceLayer)]
    tables = [module for module in view.names if isinstance(module, nn.Embedding)]
    kept = modules_within(whole) - {*whole} | modules_within(tables) - {*tables}
    for module in modules_within(layers or [model]) - kept:
        # `whole` comes first: such a module gathers for all of its layers.
        if module in whole:
            surround(module, WholeSequence, group)
        elif isinstance(module, nn.Embedding):
            surround(module, SplitSequence, group)
        if isinstance(module, Region | SequenceLayer | SplitSequence | WholeSequence):
            vars(module)["_sequence"] = shares
        elif isinstance(module, TensorParallelLayer) and not isinstance(module, HeadParameters):
            vars(module)["sequence"] = shares
    vars(surround(model, SequenceRoot, group)).update(
        _sequence=shares, _configs=[] if layers else mask_configs(model), _layered=bool(layers)
    )
    for layer in layers:
        vars(layer).update(_first=layer is layers[0], _last=layer is layers[-1])


def sequence_share(model: nn.Module, length: int) -> int:
    """Return the number of tokens in this rank's hidden states between layers.

    Args:
        model: A model, wrapped or not; without sequence parallelism the result is `length`.
        length: Tokens of the sequence that the model is called with.
    """
    shares = find_shares(model)
    if shares is None:
        return length
    group = shares.group
    return shard_sizes(length, get_world_size(group))[get_rank(group)]


def shares_in_layers(model: nn.Module) -> bool:
    """Return whether only layers of style "sequence_layer" work on sequence shards."""
    return any(isinstance(module, SequenceLayer) for module in model.modules())


def _find_ids(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the token ids or positions, [B, L], among a model's arguments, or None."""
    for value in (*args[:1], kwargs.get("input_ids"), kwargs.get("position_ids")):
        if isinstance(value, Tensor) and value.ndim > 1 and not value.is_floating_point():
            return value
    return None


def counts_of_ids(model: nn.Module) -> bool:
    """Return whether a model derives positions from non-padding ids, as RoBERTa does."""
    tables = (module._modules.get("position_embeddings") for module in model.modules())
    return any(isinstance(t, nn.Embedding) and t.padding_idx is not None for t in tables)


def _lacks_positions(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a model takes `position_ids` and is called without them."""
    if counts_of_ids(model):
        return False
    signature = inspect.signature(own_class(model).forward)
    if "position_ids" not in signature.parameters or kwargs.get("position_ids") is not None:
        return False
    return "position_ids" not in signature.bind_partial(model, *args).arguments

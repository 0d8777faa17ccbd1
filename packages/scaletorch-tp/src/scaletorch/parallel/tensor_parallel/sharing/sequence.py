"""Sequence parallelism: from the first to the last layer each rank has a shard of every sequence.

In a layer, a region begins with an all-gather and ends with a reduce-scatter instead of an
all-reduce. Norms, dropout and residuals work on 1/tp of the tokens. Before and after the layers
sequences are whole, as in one process. Source: https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ....dist.building import map_tensors, tensors_in
from ...pg_manager.building import around_compiled, uncompiled
from ...placement import ModelView, modules_within
from ..layers.base import TensorParallelLayer
from ..layers.linear import ColumnParallelLinear
from ..layers.own_parameters import HeadParameters
from ..regions.random import common_random, end_sharded_random, refused_again, sharded_random
from ..regions.region import Region
from ..regions.sequence_shares import (
    DIM,
    SequenceShares,
    change_arguments,
    convert_hidden,
    in_backward,
    refuse_shard,
    shapes_explained,
    unfit,
)
from ..regions.surround import Surrounded, own_class, surround


class WholeSequence(Surrounded):
    """Mixin of attention that is not a region: runs on full sequences and returns this shard."""

    _sequence: SequenceShares

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on full sequences."""
        name, shares = own_class(self).__name__, self._sequence
        args, kwargs, length = convert_hidden(
            self, shares, shares.whole, args, kwargs, join_residuals=True
        )
        with refused_again(name), common_random():  # every rank draws the same
            out = super().forward(*args, **kwargs)
        return _split_hidden(name, out, length, shares)


@uncompiled
def _split_hidden(name: str, out: Any, length: int, shares: SequenceShares) -> Any:
    """Return an output with this rank's shard of its hidden states [..., `length`, H]."""

    def is_hidden(x: Tensor) -> bool:
        return x.is_floating_point() and 1 < x.ndim < 4 and x.shape[DIM] == length

    if not any(map(is_hidden, tensors_in(out))):  # its gradient would be partial, and not summed
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors_in(out)) or "none"
        raise unfit(
            f"with sequence parallelism {name} must return hidden states [..., {length}, H], and "
            f"returned tensors of shapes {shapes}"
        )
    return map_tensors(lambda x: shares.split(x) if is_hidden(x) else x, out)


# Names of layer arguments with per-token values other than hidden states.
_OF_TOKENS = ("input_ids", "per_layer_input", "per_layer_inputs")


class SequenceLayer(Surrounded):
    """Mixin of a layer that works on this rank's shard of sequences, and so do its hooks."""

    _sequence: SequenceShares  # of its list
    _lists: Sequence[SequenceShares]  # of all lists
    _first: bool = False  # the first of a list: splits its inputs
    _last: bool = False  # the last of a list: gathers its output

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward, which activation recomputation runs again."""
        self._sequence.recall(_hidden_in((*args, *kwargs.values())))
        return super().forward(*args, **kwargs)

    @around_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on sequence shards."""
        shares = self._sequence
        args, kwargs = _shared_out(self, shares, args, kwargs)
        with sharded_random(self._tp_group) if self.training else nullcontext():
            out = super().__call__(*args, **kwargs)
        return _joined(own_class(self).__name__, out, shares) if self._last else out


@uncompiled
def _joined(name: str, out: Any, shares: SequenceShares) -> Any:
    """Return a layer's output with its hidden states, and others of their shape, gathered."""
    shares.sharing = False
    end_sharded_random()  # activations are full after this layer
    hidden = _hidden_in(tensors_in(out))
    if hidden is None:
        raise unfit(f"with sequence parallelism {name} must return hidden states [..., L, H]")
    dim, kind = _token_dim(hidden, shares), (hidden.shape, hidden.is_floating_point())

    def whole(x: Tensor) -> Tensor:
        return shares.whole(x, dim) if (x.shape, x.is_floating_point()) == kind else x

    return map_tensors(whole, out)


def _hidden_in(tensors: Iterable[Any]) -> Tensor | None:
    """Return the first floating tensor of more than two dims."""
    floating = (x for x in tensors if isinstance(x, Tensor) and x.is_floating_point())
    return next((x for x in floating if x.ndim > 2), None)


def _token_dim(x: Tensor, shares: SequenceShares) -> int:
    """Return the dim of tokens in hidden states [..., L, H], or in several streams [B, L, S, H]."""
    length = shares.length
    # With other ranks' lengths, so that all ranks refuse alike.
    lengths = () if length is None else (length, *shares.sizes_of(length))
    if x.ndim != 4 or x.shape[1] not in lengths:
        return DIM
    if x.shape[DIM] in lengths:
        raise unfit(
            f"in hidden states {tuple(x.shape)} two dims are as long as the sequence of "
            f"{length} tokens or a rank's shard of them ({', '.join(map(str, lengths[1:]))}), so "
            "the dim to divide is unknown",
            "take another length or batch size",
        )
    return 1


@uncompiled
def _shared_out(
    layer: SequenceLayer, shares: SequenceShares, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a layer, with this rank's shard of per-token ones."""
    again = in_backward()
    hidden = _hidden_in((*args, *kwargs.values()))
    if hidden is None:
        kind = own_class(layer).__name__
        raise unfit(f"{kind} must be called with hidden states [..., L, H], a floating tensor")
    begins = layer._first and not shares.sharing and not again
    if begins:
        refuse_shard(hidden, layer._lists)
        streams = hidden.ndim > 3 and hidden.shape[1] == shares.length != hidden.shape[DIM]
        shares.length = hidden.shape[1 if streams else DIM]
        shares.batch = hidden.shape[0] if hidden.ndim == 3 else shares.batch
    shares.recall(hidden)
    dim = _token_dim(hidden, shares)
    whole = begins or (again and hidden.shape[dim] == shares.length)
    if not again:
        shares.sharing = True
    shard = shares.split(hidden, dim) if whole else hidden
    shares.sizes(shard, dim)  # raises if it is not this rank's shard

    def share(key: str, x: Any) -> Any:
        if x is hidden:
            return shard
        if key not in _OF_TOKENS or not isinstance(x, Tensor):
            return x
        tokens = DIM if x.is_floating_point() else -1  # ids [..., L], or embeddings [..., L, H]
        return shares.split(x, tokens) if x.shape[tokens] == shares.length else x

    return change_arguments(layer, share, args, kwargs)


class SequenceRoot(Surrounded):
    """Mixin of the model: notes the length of sequences, which later pipeline stages need."""

    _sequences: Sequence[SequenceShares] = ()  # of each list of layers

    @around_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, which may be a layer itself."""
        given = (*args[:1], kwargs.get("input_ids"), kwargs.get("position_ids"))
        tensors = (x for x in given if isinstance(x, Tensor) and x.ndim > 1)
        ids = next((x for x in tensors if not x.is_floating_point()), None)
        for shares in self._sequences:
            shares.length = None if ids is None else ids.shape[-1]
            shares.batch = 0 if ids is None else ids.shape[0]
            shares.sharing = False
        with ExitStack() as stack:
            for shares in self._sequences[:1]:  # none in a slice of an nn.Sequential
                stack.enter_context(shapes_explained(own_class(self).__name__, shares))
            return super().__call__(*args, **kwargs)


def share_sequences(
    view: ModelView,
    group: ProcessGroup | None,
    layers: Iterable[nn.Module],
    whole: Collection[nn.Module],
) -> None:
    """Make layers sequence parallel, in place; modules in `whole` become `WholeSequence`."""
    lists: dict[str, list[nn.Module]] = {}
    for layer in layers:
        lists.setdefault(view.names[layer].rpartition(".")[0], []).append(layer)
    sequences = [SequenceShares(group) for _ in lists]
    kept = modules_within(whole) - {*whole}
    for listed, shares in zip(lists.values(), sequences, strict=True):
        for module in modules_within(listed) - kept:
            # `whole` comes first: a module in it gathers for all of its layers.
            if module in whole:
                surround(module, WholeSequence, group)
            if isinstance(module, Region | WholeSequence):
                vars(module)["_sequence"] = shares
            elif isinstance(module, TensorParallelLayer) and not isinstance(module, HeadParameters):
                vars(module)["sequence"] = shares
        for layer in listed:
            ends = {"_first": layer is listed[0], "_last": layer is listed[-1]}
            vars(surround(layer, SequenceLayer, group)).update(
                ends, _sequence=shares, _lists=sequences
            )
    inside = modules_within(module for listed in lists.values() for module in listed)
    for module in view.names:
        if isinstance(module, ColumnParallelLinear) and module not in inside:
            vars(module)["lists"] = sequences
    vars(surround(view.model, SequenceRoot, group))["_sequences"] = sequences

"""Sequence parallelism: between regions each rank holds a shard of every sequence.

A region begins with an all-gather and ends with a reduce-scatter instead of an all-reduce. Norms,
dropout and residuals work on 1/tp of the tokens. Source: https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ....dist.building import map_tensors, tensors_in
from ...pg_manager.building import around_compiled, uncompiled
from ...placement import ModelView, modules_within
from ..layers.base import TensorParallelLayer
from ..layers.own_parameters import HeadParameters
from ..regions.random import common_random, end_sharded_random, refused_again, sharded_random
from ..regions.region import Region
from ..regions.sequence_shares import (
    DIM,
    SequenceShares,
    change_arguments,
    convert_hidden,
    find_shares,
    in_backward,
    shapes_explained,
    unfit,
)
from ..regions.surround import Surrounded, own_class, surround

_LIBRARY = "transformers.masking_utils"


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


@contextmanager
@around_compiled
def whole_masks(shares: SequenceShares) -> Iterator[None]:
    """Replace transformers' mask functions, which read a shard's length, by ones for sequences."""
    library = sys.modules.get(_LIBRARY)
    if library is None or shares.length is None:
        yield
        return
    table = library.ALL_MASK_ATTENTION_FUNCTIONS
    before = {name: table[name] for name in table}
    table.update({name: partial(_whole_mask, make, shares) for name, make in before.items()})
    try:
        yield
    finally:
        for name, make in before.items():
            del table[name]  # drop our local entry; the global one shows again
            if table.get(name) is not make:
                table[name] = make


def _whole_padding(mask: Any, shares: SequenceShares) -> Any:
    """Return a padding mask [B, L] for full sequences, also for a shard's mask of ones."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[-1] == shares.length:
        return mask
    if mask.shape[-1] != shares.local or not bool(mask.all()):
        raise unfit(
            f"the model asks for a mask with padding of shape {tuple(mask.shape)}, where sequences "
            f"have {shares.length} tokens",
            "pass an attention_mask of whole sequences",
        )
    return mask.new_ones(mask.shape[0], shares.length or 0)


@uncompiled
def _whole_mask(make: Callable[..., Any], shares: SequenceShares, **options: Any) -> Any:
    """Make the mask that the model requested, but for full sequences."""
    whole, shard = shares.length, shares.local
    queries, keys = options.get("q_length"), options.get("kv_length")
    if queries == shard:
        if keys not in (shard, whole) or options.get("q_offset", 0):  # with a cache
            raise unfit(
                f"the model asks for a mask of {queries} queries, from position "
                f"{options.get('q_offset', 0)} on, and {keys} keys; sequence parallelism makes "
                "masks of whole sequences only",
                "pass use_cache=False",
            )
        options |= {"q_length": whole, "kv_length": whole}
        options["attention_mask"] = _whole_padding(options.get("attention_mask"), shares)
    return make(**options)


# Names of layer arguments with per-token values other than hidden states.
OF_TOKENS = ("input_ids", "per_layer_input", "per_layer_inputs")
WHOLE_IDS = ("ple_input_ids",)  # ids that stay full, since neighbours of a token count


class SequenceLayer(Surrounded):
    """Mixin of a layer that works on this rank's shard of sequences."""

    _sequence: SequenceShares | None = None  # None without sequence parallelism
    _first: bool = False  # the first of a list: splits its inputs
    _last: bool = False  # the last of a list: gathers its output

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward on sequence shards."""
        shares = self._sequence
        if shares is None:
            return super().forward(*args, **kwargs)
        args, kwargs = _shared_out(self, shares, args, kwargs)
        with sharded_random(self._tp_group) if self.training else nullcontext():
            out = super().forward(*args, **kwargs)
        return _joined(out, shares) if self._last else out


@uncompiled
def _joined(out: Any, shares: SequenceShares) -> Any:
    """Return a layer's output with its hidden states gathered."""
    shares.sharing = False
    end_sharded_random()  # activations are full after this layer
    if isinstance(out, dict):  # an output of transformers
        name = next(name for name, value in out.items() if isinstance(value, Tensor))
        out[name] = shares.whole(out[name])
        return out
    if not isinstance(out, Tensor):
        return type(out)((shares.whole(out[0]), *out[1:]))
    return shares.whole(out, _token_dim(out, shares))


def _token_dim(x: Tensor, shares: SequenceShares) -> int:
    """Return the dim of tokens in hidden states [..., L, H], or in several streams [B, L, S, H]."""
    lengths = (shares.length, shares.local)
    if x.ndim != 4 or x.shape[1] not in lengths:
        return DIM
    if x.shape[DIM] in lengths:
        raise unfit(
            f"in hidden states {tuple(x.shape)} two dims are as long as the sequence of "
            f"{shares.length} tokens or a rank's shard of {shares.local}, so the dim to divide is "
            "unknown",
            "take another length or batch size",
        )
    return 1


@uncompiled
def _shared_out(
    layer: SequenceLayer, shares: SequenceShares, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a layer, with this rank's shard of per-token ones."""
    again = in_backward()
    given = (*args, *kwargs.values())
    floating = (x for x in given if isinstance(x, Tensor) and x.is_floating_point())
    hidden = next((x for x in floating if x.ndim > 2), None)
    if hidden is None:
        raise unfit(
            f"with sequence parallelism {own_class(layer).__name__} must be called with hidden "
            "states [..., L, H], a floating tensor"
        )
    begins = layer._first and not shares.sharing and not again
    if begins:
        streams = hidden.ndim > 3 and hidden.shape[1] == shares.length != hidden.shape[DIM]
        shares.length = hidden.shape[1 if streams else DIM]
        shares.batch = hidden.shape[0] if hidden.ndim == 3 else shares.batch
    dim = _token_dim(hidden, shares)
    whole = begins or (again and hidden.shape[dim] == shares.length)
    if not again:
        shares.sharing = True
    shard = shares.split(hidden, dim) if whole else hidden
    shares.sizes(shard, dim)  # raises if it is not this rank's shard

    def share(key: str, x: Any) -> Any:
        if x is hidden:
            return shard
        if key not in OF_TOKENS or not isinstance(x, Tensor):
            return x
        tokens = DIM if x.is_floating_point() else -1  # ids [..., L], or embeddings [..., L, H]
        return shares.split(x, tokens) if x.shape[tokens] == shares.length else x

    return change_arguments(layer, share, args, kwargs)


class SequenceRoot(Surrounded):
    """Mixin of the model: records sequence lengths and uses this rank's random stream."""

    _sequence: SequenceShares | None = None  # a slice of an nn.Sequential has none
    _layered: bool = False  # sequences are full before and after the layers

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward."""
        if self._sequence is None:
            return super().forward(*args, **kwargs)
        # Only token ids or positions [B, L] are full, so only they give the length of the sequence.
        given = (*args[:1], kwargs.get("input_ids"), kwargs.get("position_ids"))
        tensors = (x for x in given if isinstance(x, Tensor) and x.ndim > 1)
        ids = next((x for x in tensors if not x.is_floating_point()), None)
        self._sequence.length = None if ids is None else ids.shape[-1]
        self._sequence.batch = 0 if ids is None else ids.shape[0]
        self._sequence.sharing = not self._layered
        if ids is not None and not self._layered and _lacks_positions(self, args, kwargs):
            # The model itself would count only the tokens of its shard.
            kwargs["position_ids"] = torch.arange(ids.shape[-1], device=ids.device)[None]
        with ExitStack() as stack:
            stack.enter_context(shapes_explained(own_class(self).__name__, self._sequence))
            if not self._layered:  # else the layers see whole sequences' masks, and do the latter
                stack.enter_context(whole_masks(self._sequence))
                if self.training:
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
            raise unfit(
                f"with sequence parallelism {own_class(self).__name__} must be called with all "
                f"{length} tokens' ids or positions, and returned a tensor of shape "
                f"{tuple(out.shape)}",
                "if the model counts positions, style its layers 'sequence_layer'",
            )
        return self._sequence.split(out)


def share_sequences(
    view: ModelView, group: ProcessGroup | None, whole: Sequence[nn.Module] = ()
) -> None:
    """Make a model with tensor-parallel layers sequence parallel, in place.

    Modules in `whole` become `WholeSequence`. Outside of any `SequenceLayer` nothing changes.
    """
    shares, model = SequenceShares(group), view.model
    layers = [module for module in view.names if isinstance(module, SequenceLayer)]
    tables = [module for module in view.names if isinstance(module, nn.Embedding)]
    kept = modules_within(whole) - {*whole} | modules_within(tables) - {*tables}
    for module in modules_within(layers or [model]) - kept:
        # `whole` comes first: a module in it gathers for all of its layers.
        if module in whole:
            surround(module, WholeSequence, group)
        elif isinstance(module, nn.Embedding):
            surround(module, SplitSequence, group)
        if isinstance(module, Region | SequenceLayer | SplitSequence | WholeSequence):
            vars(module)["_sequence"] = shares
        elif isinstance(module, TensorParallelLayer) and not isinstance(module, HeadParameters):
            vars(module)["sequence"] = shares
    vars(surround(model, SequenceRoot, group)).update(_sequence=shares, _layered=bool(layers))
    for layer in layers:
        vars(layer).update(_first=layer is layers[0], _last=layer is layers[-1])


def sequence_share(model: nn.Module, length: int) -> int:
    """Return the number of tokens in this rank's hidden states between layers.

    The model, wrapped or not, is called with `length` tokens. Without sequence parallelism it is
    `length`.
    """
    shares = find_shares(model)
    return length if shares is None else shares.sizes_of(length)[shares.rank]


def shares_in_layers(model: nn.Module) -> bool:
    """Return whether only layers of style "sequence_layer" work on sequence shards."""
    return any(isinstance(module, SequenceLayer) for module in model.modules())


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

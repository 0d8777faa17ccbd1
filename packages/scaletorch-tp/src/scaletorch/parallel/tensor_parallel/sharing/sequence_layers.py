"""Layers that alone work on sequence shards, from the first to the last of a list.

Code of the model before and after these layers (masks, positions, attention biases, per-layer
embeddings, images) works on full sequences, as in one process.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ...pg_manager.building import around_compiled, uncompiled
from ..regions.hidden_states import argument_names
from ..regions.overlap import DIM
from ..regions.random import sharded_random
from ..regions.sequence_shares import SequenceShares
from ..regions.surround import Surrounded, own_class

# Names of layer arguments with per-token values other than hidden states.
OF_TOKENS = ("input_ids", "per_layer_input", "per_layer_inputs")
WHOLE_IDS = ("ple_input_ids",)  # ids that stay full, since neighbours of a token count


class SequenceLayer(Surrounded):
    """Mixin of a layer that works on this rank's shard of sequences.

    The first layer of a list splits its inputs, and the last one gathers its output; between them
    hidden states are shards.
    """

    _sequence: SequenceShares | None = None  # None without sequence parallelism
    _first: bool = False
    _last: bool = False

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
    shares.sharing = False
    if isinstance(out, dict):  # an output of transformers
        name = next(name for name, value in out.items() if isinstance(value, Tensor))
        out[name] = shares.join(out[name])
        return out
    if not isinstance(out, Tensor):
        return type(out)((shares.join(out[0]), *out[1:]))
    rows = _rows(out, shares)
    return shares.join(rows) if rows is out else shares.join(rows).unflatten(-1, out.shape[DIM:])


def _rows(x: Tensor, shares: SequenceShares) -> Tensor:
    """Return hidden states as [..., L, H]; several streams, [B, L, S, H], become [B, L, S * H].

    Raises:
        InvalidArgumentError: The shape does not tell whether there are several streams.
    """
    lengths = (shares.length, shares.own)
    if x.ndim != 4 or x.shape[1] not in lengths:
        return x
    if x.shape[DIM] in lengths:
        raise InvalidArgumentError(
            f"{describe_rank()}: of hidden states {tuple(x.shape)} two dims are as long as the "
            f"sequence of {shares.length} tokens or a rank's share of it, {shares.own}, so it is "
            "not known which one is to be shared out; take another length or batch size, or do "
            "without sequence parallelism"
        )
    return x.flatten(DIM)


@uncompiled
def _shared_out(
    layer: SequenceLayer, shares: SequenceShares, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a layer, with this rank's shard of per-token ones."""
    name, again = own_class(layer).__name__, torch._C._current_graph_task_id() != -1
    given = (*args, *kwargs.values())
    hidden = next((x for x in given if _is_hidden(x)), None)
    if hidden is None:
        raise InvalidArgumentError(
            f"{describe_rank()}: with sequence parallelism {name} must be called with hidden "
            "states [..., L, H], a floating tensor; do without sequence parallelism"
        )
    begins = layer._first and not shares.sharing and not again
    if begins:
        streams = hidden.ndim > 3 and hidden.shape[1] == shares.length != hidden.shape[DIM]
        shares.length = hidden.shape[1 if streams else DIM]
        shares.batch = hidden.shape[0] if hidden.ndim == 3 else shares.batch
    rows = _rows(hidden, shares)
    whole = begins or (again and rows.shape[DIM] == shares.length)
    if not again:
        shares.sharing = True
    shared = shares.split(rows) if whole else rows
    shares.sizes(shared)  # raises if it is not this rank's shard
    own = shared if rows is hidden else shared.unflatten(-1, hidden.shape[DIM:])

    def share(key: str, x: Any) -> Any:
        if x is hidden:
            return own
        if not isinstance(x, Tensor):
            return x
        if key in OF_TOKENS:
            return _of_tokens(x, shares)
        _require_none(name, key, x, hidden, shares)
        return x

    by_name = {key: share(key, x) for key, x in kwargs.items()}
    return tuple(map(share, argument_names(layer, args), args)), by_name


def _is_hidden(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 2


def _of_tokens(x: Tensor, shares: SequenceShares) -> Tensor:
    """Return this rank's shard of ids [..., L] or of embeddings [..., L, H]."""
    if x.is_floating_point():
        return shares.split(x) if x.shape[DIM] == shares.length else x
    if x.shape[-1] != shares.length:
        return x
    sizes = shares.sizes_of(x.shape[-1])
    return x.narrow(-1, sum(sizes[: shares.rank]), sizes[shares.rank])


def _require_none(name: str, key: str, x: Tensor, hidden: Tensor, shares: SequenceShares) -> None:
    """Refuse an argument that may be a second sequence, since it would stay full."""
    whole = (*hidden.shape[:DIM], shares.length)
    if x.requires_grad and x.ndim == hidden.ndim and x.shape[:-1] == whole:
        raise InvalidArgumentError(
            f"{describe_rank()}: {name} was called with '{key}' of shape {tuple(x.shape)} beside "
            "its hidden states; with sequence parallelism it cannot be known whether it is of each "
            "token, of which a rank has its share, or whole; do without sequence parallelism"
        )

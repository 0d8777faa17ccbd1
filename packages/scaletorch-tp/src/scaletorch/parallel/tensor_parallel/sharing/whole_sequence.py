"""Attention that is no region sees whole sequences between shards of them, and so do its masks.

Models of `transformers` make masks from the length of their hidden states, which with sequence
parallelism is that of a shard, while attention sees the whole sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ...pg_manager.building import around_compiled, uncompiled
from ..regions.hidden_states import convert_hidden
from ..regions.overlap import DIM
from ..regions.random import common_random, refused_again
from ..regions.sequence_shares import SequenceShares
from ..regions.surround import Surrounded, own_class

_LIBRARY = "transformers.masking_utils"


class WholeSequence(Surrounded):
    """An attention that the plan leaves whole, or shards in another way than as a region.

    It sees whole sequences, the same on every rank, and keeps this rank's share of what it
    returns. So its parameters' gradients are whole, and its layers are as without shares.
    """

    _sequence: SequenceShares

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on whole sequences."""
        name, shares = own_class(self).__name__, self._sequence
        args, kwargs, length = convert_hidden(
            self, shares, shares.whole, args, kwargs, join_residuals=True
        )
        with refused_again(name), common_random():  # every rank draws the same
            out = super().forward(*args, **kwargs)
        own, found = _shared(out, length, shares)
        if not found:
            raise InvalidArgumentError(
                f"{describe_rank()}: with sequence parallelism {name} must return hidden states "
                f"[..., {length}, H], or a tuple that holds them, and returned "
                f"{type(out).__name__}; do without sequence parallelism"
            )
        return own


@uncompiled
def _shared(out: Any, length: int, shares: SequenceShares) -> tuple[Any, bool]:
    """Return what a module returned with this rank's share of hidden states in it, if any."""
    if isinstance(out, Tensor):
        is_hidden = out.is_floating_point() and 1 < out.ndim < 4 and out.shape[DIM] == length
        return (shares.split(out), True) if is_hidden else (out, False)
    if type(out) not in (tuple, list):
        return out, False
    pairs = [_shared(each, length, shares) for each in out]
    return type(out)(each for each, _ in pairs), any(found for _, found in pairs)


def mask_configs(model: nn.Module) -> list[Any]:
    """Return the configs in which a model and those inside it say how they attend."""
    found = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in found if hasattr(config, "_attn_implementation")}
    return list(configs.values())


@contextmanager
@around_compiled
def whole_masks(configs: Sequence[Any], shares: SequenceShares) -> Iterator[None]:
    """Let the body's models make their masks for whole sequences.

    The functions by which they make them are replaced for as long, in the mapping from which they
    take them.

    Args:
        configs: What `mask_configs` found.
        shares: How sequences are shared out; nothing changes if their length is not known.
    """
    library = sys.modules.get(_LIBRARY)
    if library is None or not configs or shares.length is None:
        yield
        return
    table = library.ALL_MASK_ATTENTION_FUNCTIONS
    names = {config._attn_implementation for config in configs} & set(table)
    before = {name: table[name] for name in names}
    table.update({name: partial(_whole_mask, make, shares) for name, make in before.items()})
    try:
        yield
    finally:
        for name, make in before.items():
            del table[name]  # ours; what all have of that name shows again
            if table[name] is not make:
                table[name] = make


def _whole_padding(mask: Any, shares: SequenceShares) -> Any:
    """Return a padding mask [B, L] for whole sequences; models make one of ones for a share.

    Raises:
        InvalidArgumentError: It has padding, and is for a share.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[-1] == shares.length:
        return mask
    if mask.shape[-1] != shares.own or not bool(mask.all()):
        raise InvalidArgumentError(
            f"{describe_rank()}: the model asks for a mask with padding of shape "
            f"{tuple(mask.shape)}, where sequences have {shares.length} tokens; pass an "
            "attention_mask of whole sequences, or do without sequence parallelism"
        )
    return mask.new_ones(mask.shape[0], shares.length or 0)


@uncompiled
def _whole_mask(make: Callable[..., Any], shares: SequenceShares, **options: Any) -> Any:
    """Make a mask as the model asked for it, but of whole sequences.

    Raises:
        InvalidArgumentError: It is for other keys than the queries'.
    """
    whole, own = shares.length, shares.own
    queries, keys = options.get("q_length"), options.get("kv_length")
    if queries == own:
        if keys not in (own, whole) or options.get("q_offset", 0):
            raise InvalidArgumentError(
                f"{describe_rank()}: the model asks for a mask of {queries} queries, from position "
                f"{options.get('q_offset', 0)} on, and {keys} keys; with sequence parallelism "
                "there is one for a whole sequence alone: pass use_cache=False"
            )
        options |= {"q_length": whole, "kv_length": whole}
        options["attention_mask"] = _whole_padding(options.get("attention_mask"), shares)
    elif queries != whole:
        raise InvalidArgumentError(
            f"{describe_rank()}: the model asks for a mask of {queries} queries, but this rank has "
            f"{own} of {whole} tokens; do without sequence parallelism"
        )
    return make(**options)

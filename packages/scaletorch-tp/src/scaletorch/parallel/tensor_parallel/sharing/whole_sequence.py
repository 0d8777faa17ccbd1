"""Full sequences, and full masks, for attention that is not a region.

Models of `transformers` make masks from the length of their hidden states. Under sequence
parallelism this is the length of a shard, but attention works on the full sequence.
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
from ..regions.random import common_random, refused_again
from ..regions.sequence_shares import DIM, SequenceShares, convert_hidden
from ..regions.surround import Surrounded, own_class

_LIBRARY = "transformers.masking_utils"


class WholeSequence(Surrounded):
    """Mixin of attention that is replicated, or sharded in another way than as a region.

    It gathers its input, runs on the full sequence on every rank, and returns this rank's shard of
    the output. So its parameters have full gradients, and its layers need no sequence parallelism.
    """

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
        local, found = _shared(out, length, shares)
        if not found:
            raise InvalidArgumentError(
                f"{describe_rank()}: with sequence parallelism {name} must return hidden states "
                f"[..., {length}, H], or a tuple that holds them, and returned "
                f"{type(out).__name__}; do without sequence parallelism"
            )
        return local


@uncompiled
def _shared(out: Any, length: int, shares: SequenceShares) -> tuple[Any, bool]:
    """Split the hidden states in an output; return the output and whether it had any."""
    if isinstance(out, Tensor):
        is_hidden = out.is_floating_point() and 1 < out.ndim < 4 and out.shape[DIM] == length
        return (shares.split(out), True) if is_hidden else (out, False)
    if type(out) not in (tuple, list):
        return out, False
    pairs = [_shared(item, length, shares) for item in out]
    return type(out)(item for item, _ in pairs), any(found for _, found in pairs)


def mask_configs(model: nn.Module) -> list[Any]:
    """Return the distinct configs of a model and its submodules that set the attention function."""
    found = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in found if hasattr(config, "_attn_implementation")}
    return list(configs.values())


@contextmanager
@around_compiled
def whole_masks(configs: Sequence[Any], shares: SequenceShares) -> Iterator[None]:
    """Replace transformers' mask functions in its registry by ones for full sequences."""
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
            del table[name]  # drop our local entry; the global one shows again
            if table[name] is not make:
                table[name] = make


def _whole_padding(mask: Any, shares: SequenceShares) -> Any:
    """Return a padding mask [B, L] for full sequences, also for a shard's mask of ones."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[-1] == shares.length:
        return mask
    if mask.shape[-1] != shares.local or not bool(mask.all()):
        raise InvalidArgumentError(
            f"{describe_rank()}: the model asks for a mask with padding of shape "
            f"{tuple(mask.shape)}, where sequences have {shares.length} tokens; pass an "
            "attention_mask of whole sequences, or do without sequence parallelism"
        )
    return mask.new_ones(mask.shape[0], shares.length or 0)


@uncompiled
def _whole_mask(make: Callable[..., Any], shares: SequenceShares, **options: Any) -> Any:
    """Make the mask that the model requested, but for full sequences."""
    whole, shard = shares.length, shares.local
    queries, keys = options.get("q_length"), options.get("kv_length")
    if queries == shard:
        if keys not in (shard, whole) or options.get("q_offset", 0):  # with a cache
            raise InvalidArgumentError(
                f"{describe_rank()}: the model asks for a mask of {queries} queries, from position "
                f"{options.get('q_offset', 0)} on, and {keys} keys; sequence parallelism makes "
                "masks of whole sequences only: pass use_cache=False"
            )
        options |= {"q_length": whole, "kv_length": whole}
        options["attention_mask"] = _whole_padding(options.get("attention_mask"), shares)
    elif queries != whole:
        raise InvalidArgumentError(
            f"{describe_rank()}: the model asks for a mask of {queries} queries, but this rank has "
            f"{shard} of {whole} tokens; do without sequence parallelism"
        )
    return make(**options)

"""Masks that models of `transformers` make from the length of their hidden states.

With sequence parallelism that is the length of a share, while attention sees the whole sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from .sequence_shares import SequenceShares
from .uncompiled import around_compiled, uncompiled

_LIBRARY = "transformers.masking_utils"


def mask_configs(model: nn.Module) -> list[Any]:
    """Return the configs in which a model and those inside it say how they attend."""
    found = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in found if hasattr(config, "_attn_implementation")}
    return list(configs.values())


@contextmanager
@around_compiled
def whole_masks(configs: Sequence[Any], shares: SequenceShares) -> Iterator[None]:
    """Let the body's models make their masks for whole sequences.

    The functions by which they make them are replaced for as long, in the mapping where they look
    them up.

    Args:
        configs: What `mask_configs` found.
        shares: How sequences are shared out; nothing changes where their length is not known.
    """
    library = sys.modules.get(_LIBRARY)
    if library is None or not configs or shares.length is None:
        yield
        return
    table = library.ALL_MASK_ATTENTION_FUNCTIONS
    names = {config._attn_implementation for config in configs} & set(table)
    before = {name: table[name] for name in names}
    table.update({name: partial(_whole, make, shares) for name, make in before.items()})
    try:
        yield
    finally:
        for name, make in before.items():
            del table[name]  # ours; what all have of that name shows again
            if table[name] is not make:
                table[name] = make


@uncompiled
def _whole(make: Callable[..., Any], shares: SequenceShares, **options: Any) -> Any:
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
    elif queries != whole:
        raise InvalidArgumentError(
            f"{describe_rank()}: the model asks for a mask of {queries} queries, but this rank has "
            f"{own} of {whole} tokens; do without sequence parallelism"
        )
    return make(**options)

"""The meaning of the masks that models of `transformers` request; no mask tensor is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....dist.errors import InvalidArgumentError, StateError
from ...pg_manager import describe_rank
from ..agreement import require_agreement
from .arguments import require_no_padding, require_positions
from .override import running_override
from .settings import refusal


@dataclass(frozen=True, slots=True)
class Pattern:
    """The meaning of a mask, in place of a tensor.

    A model that changes its mask, as by a bias or by keys that it selects, is refused.
    """

    causal: bool
    window: int | None
    chunk: int | None = None

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> Any:
        """Refuse all computation."""
        raise _mask_change_error(getattr(func, "__name__", "a function"))

    def __getattr__(self, name: str) -> Any:
        """Refuse attributes and methods of tensors."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise _mask_change_error(name)

    def __getitem__(self, _: Any) -> Any:
        """Refuse to be indexed."""
        raise _mask_change_error("an index")

    def __add__(self, _: Any) -> Any:
        """Refuse arithmetic."""
        raise _mask_change_error("a sum")

    __radd__ = __mul__ = __rmul__ = __and__ = __rand__ = __add__


def _mask_change_error(by: str) -> InvalidArgumentError:
    return refusal(
        f"the model changes its attention mask by {by}, and no mask is built over shards: "
        "attention with a bias of its own, or with keys that it chooses, cannot be computed"
    )


def context_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> Pattern | None:
    """Return the meaning of the mask that a model requests.

    Args:
        q_length: Number of queries.
        kv_length: Number of keys.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
        mask_function: A function of transformers that decides which keys a query sees.
        attention_mask: The mask of the shard, or None.
        allow_is_causal_skip: Return None for plain causal attention, as the function for "sdpa".
        allow_is_bidirectional_skip: Return None for full attention, as the function for "sdpa".

    Raises:
        InvalidArgumentError: It cannot be computed; other ranks get an error too.
        StateError: No context-parallel model is running.
    """
    override = running_override()
    if override is None:
        raise foreign_model_error("a mask")
    settings = override.settings
    try:
        if attention_mask is not None:
            require_no_padding(attention_mask, q_length, settings)
        _require_one_sequence(q_length, kv_length, int(q_offset), kv_offset)
        require_positions(override.position_ids, q_length, settings, override.given)
        pattern = _pattern(mask_function)
    except InvalidArgumentError as error:  # one rank's shard may be refused; the others continue
        tensors = (attention_mask, override.position_ids)
        devices = (x.device for x in tensors if isinstance(x, Tensor))
        require_agreement((), next(devices, torch.device("cpu")), settings.ring, error)
        raise
    skip = allow_is_causal_skip if pattern.causal else allow_is_bidirectional_skip
    return None if skip and pattern.window is None and pattern.chunk is None else pattern


def _require_one_sequence(queries: int, keys: int, first: int, first_key: int) -> None:
    if first or first_key or keys != queries:
        raise refusal(
            f"{queries} queries from position {first} on and {keys} keys: neither decoding with a "
            "cache nor cross attention can be computed; use_cache=False"
        )


def _pattern(mask_function: Any) -> Pattern:
    """Read a mask function of transformers, without the packing that it guessed from positions.

    That guess is wrong for shards, which skip positions: documents must be given.
    """
    causal, window, chunk = False, None, None
    for name, held in _components(mask_function):
        if name == "causal_mask_function":
            causal = True
        elif name == "sliding_window_overlay":
            window = held["sliding_window"]
        elif name == "sliding_window_bidirectional_overlay":
            window = held["sliding_window"] + 1  # it counts the positions on one side
        elif name == "chunked_overlay":
            chunk = held["chunk_size"]
        elif name not in ("bidirectional_mask_function", "packed_sequence_mask_function"):
            raise refusal(
                f"the model masks by {name}; causal and full attention, sliding windows and chunks "
                "can be computed, but not blocks of images"
            )
    return Pattern(causal, window, chunk)


def _has_no_images(mask_function: Any) -> bool:
    """Return whether a function adds blocks of images, and there are none."""
    ids = next(iter(_components(mask_function)))[1].get("block_sequence_ids")
    return isinstance(ids, Tensor) and not bool((ids >= 0).any())


def _components(mask_function: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the closure variables of each function whose conditions must all hold."""
    name = getattr(mask_function, "__qualname__", repr(mask_function)).partition(".<locals>")[0]
    code = getattr(mask_function, "__code__", None)
    cells = getattr(mask_function, "__closure__", None) or ()
    names = () if code is None else code.co_freevars
    held = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    if name == "or_masks" and all(map(_has_no_images, held["mask_functions"][1:])):
        yield from _components(held["mask_functions"][0])
    elif name == "and_masks":
        for each in held["mask_functions"]:
            yield from _components(each)
    elif name == "remap_positions_for_packed_sequence":
        yield from _components(held["mask_function"])
    else:
        yield name, held


def foreign_model_error(name: str) -> StateError:
    """Return the error for a model that requests this attention and is not context parallel."""
    message = (
        f"{describe_rank()}: {name} of a model that is not context parallel asks for the "
        'attention of one that is; give each model a config of its own, or select "sdpa" again'
    )
    return StateError(message)

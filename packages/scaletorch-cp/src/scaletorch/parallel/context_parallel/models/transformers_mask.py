"""Masks that models of `transformers` ask for: their meaning, without building them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....dist.errors import InvalidArgumentError, StateError
from ...pg_manager import describe_rank
from ..agreement import require_agreement
from .calls import require_no_padding, require_positions
from .override import running_override
from .settings import refusal


@dataclass(frozen=True, slots=True)
class Pattern:
    """The meaning of a mask; it stands for one, as attention builds none.

    A model that changes its mask, as by a bias or by keys that it chooses, is refused.
    """

    causal: bool
    window: int | None
    chunk: int | None = None

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> Any:
        """Refuse to be computed with."""
        raise _changed(getattr(func, "__name__", "a function"))

    def __getattr__(self, name: str) -> Any:
        """Refuse what tensors have beside this."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise _changed(name)

    def __getitem__(self, _: Any) -> Any:
        """Refuse to be cut."""
        raise _changed("an index")

    def __add__(self, _: Any) -> Any:
        """Refuse to be added to."""
        raise _changed("a sum")

    __radd__ = __mul__ = __rmul__ = __and__ = __rand__ = __add__


def _changed(by: str) -> InvalidArgumentError:
    return refusal(
        f"the model changes its attention mask by {by}, and no mask is built over shards: "
        "attention with a bias of its own, or with keys that it chooses, cannot be computed"
    )


def context_mask(
    *, allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False, **asked: Any
) -> Pattern | None:
    """Return the meaning of a mask, if attention by `context_attention` can do it.

    None if the function for "sdpa" gives None as well: all, or all before.
    """
    pattern = _read_mask(**asked)
    skip = allow_is_causal_skip if pattern.causal else allow_is_bidirectional_skip
    return None if skip and pattern.window is None and pattern.chunk is None else pattern


def _read_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> Pattern:
    """Return what a mask that a model asks for means.

    Args:
        q_length: How many queries there are.
        kv_length: How many keys there are.
        q_offset: The first query's position.
        kv_offset: The first key's.
        mask_function: Of transformers, which says what sees what.
        attention_mask: Of the shard, or None.
        **others: What does not change the meaning.

    Raises:
        InvalidArgumentError: It cannot be computed; other ranks are told.
        StateError: No context-parallel model is running.
    """
    override = running_override()
    if override is None:
        raise stranger("a mask")
    settings = override.settings
    try:
        if attention_mask is not None:
            require_no_padding(attention_mask, q_length, settings)
        _require_one_sequence(q_length, kv_length, int(q_offset), kv_offset)
        told = settings.told is not None or override.given.get("cu_seq_lens_q") is not None
        require_positions(override.position_ids, q_length, settings, told=told)
        return _pattern(mask_function)
    except InvalidArgumentError as error:  # one rank's shard may be refused; the others go on
        device = _device(attention_mask, override.position_ids)
        require_agreement((), device, settings.ring, error)
        raise


def _device(*values: Any) -> torch.device:
    """Return the device of the first tensor."""
    tensors = (value for value in values if isinstance(value, Tensor))
    return next((x.device for x in tensors), torch.device("cpu"))


def _require_one_sequence(queries: int, keys: int, first: int, first_key: int) -> None:
    if first or first_key or keys != queries:
        raise refusal(
            f"{queries} queries from position {first} on and {keys} keys: neither decoding with a "
            "cache nor cross attention can be computed; use_cache=False"
        )


def _pattern(mask_function: Any) -> Pattern:
    """Read a mask function of transformers; packing that it guessed from positions is left out.

    That guess is wrong for shards, which skip positions: documents are told, not guessed.
    """
    causal, window, chunk = False, None, None
    for name, held in _parts(mask_function):
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
                "can be computed, and not what images see of themselves"
            )
    return Pattern(causal, window, chunk)


def _sees_none(mask_function: Any) -> bool:
    """Return whether a function adds blocks of images, and there are none."""
    ids = next(iter(_parts(mask_function)))[1].get("block_sequence_ids")
    return isinstance(ids, Tensor) and not bool((ids >= 0).any())


def _parts(mask_function: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each function that must hold, and the variables that it closes over."""
    name = getattr(mask_function, "__qualname__", repr(mask_function)).partition(".<locals>")[0]
    code = getattr(mask_function, "__code__", None)
    cells = getattr(mask_function, "__closure__", None) or ()
    names = () if code is None else code.co_freevars
    held = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    if name == "or_masks" and all(map(_sees_none, held["mask_functions"][1:])):
        yield from _parts(held["mask_functions"][0])
    elif name == "and_masks":
        for part in held["mask_functions"]:
            yield from _parts(part)
    elif name == "remap_positions_for_packed_sequence":
        yield from _parts(held["mask_function"])
    else:
        yield name, held


def stranger(name: str) -> StateError:
    """Return the error of a model that asks for attention and was not made context parallel."""
    message = (
        f"{describe_rank()}: {name} of a model that is not context parallel asks for the "
        'attention of one that is; give each model a config of its own, or select "sdpa" again'
    )
    return StateError(message)

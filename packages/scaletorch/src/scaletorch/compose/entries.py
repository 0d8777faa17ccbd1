"""The entries of a batch: by name, how many rows and positions, and the one a model is given first.

A model of tokens has `input_ids` [B, L], whose columns are positions of sequences. Any other model
has the first argument of its forward; which of its dims are positions nobody knows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ..dist.errors import InvalidArgumentError

TOKENS, LABELS = "input_ids", "labels"
OF_LOSS = "loss_"  # entries whose names begin so are for a loss, not for the model


def named_entries(batch: Any, arguments: Iterable[str] | None) -> dict[str, Any]:
    """Return a batch's entries by name.

    Args:
        batch: A mapping, a dataclass, or a tuple or list of what forward takes first, in its
            order, with the labels behind it if there is one more.
        arguments: Of the model's forward; None if the model is not known.

    Raises:
        InvalidArgumentError: It is none of these, or a tuple whose entries nobody can name.
    """
    if isinstance(batch, Mapping):
        return dict(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    if not isinstance(batch, tuple | list):
        raise InvalidArgumentError(
            "a global batch is a mapping of entries, a dataclass or a tuple of them, got "
            f"{type(batch).__name__}"
        )
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return dict(zip(batch._fields, batch, strict=True))
    if arguments is None:
        raise InvalidArgumentError(
            f"a batch of {len(batch)} entries without names needs model=, whose forward names them"
        )
    taken = [name for name in arguments if name != LABELS]
    names = taken[: len(batch)]
    if len(batch) == len(names) + 1:
        names.append(LABELS)
    if len(batch) != len(names):
        raise InvalidArgumentError(
            f"a batch of {len(batch)} entries does not fit a forward of {', '.join(taken)}: give "
            "them names, in a mapping"
        )
    return dict(zip(names, batch, strict=True))


def sequence_shape(entries: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return rows and positions of a batch of tokens, [B, L]; None if it has no `input_ids`.

    Raises:
        InvalidArgumentError: These are of another shape.
    """
    ids = entries.get(TOKENS)
    if ids is None:
        return None
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        came = f"has the shape {list(ids.shape)}" if isinstance(ids, Tensor) else f"is {ids!r:.40}"
        raise InvalidArgumentError(
            f"{TOKENS} {came}, and its tokens are [B, L]: name anything else as the first argument "
            "of the model's forward"
        )
    return ids.shape[0], ids.shape[1]


def row_count(entries: Mapping[str, Any], told: Mapping[str, int | None]) -> int:
    """Return how many rows a batch has: dim 0 of its first tensor that has rows.

    Args:
        entries: By name.
        told: Dims of rows that the caller names, None for an entry that has none.

    Raises:
        InvalidArgumentError: No entry has rows.
    """
    shape = sequence_shape(entries)
    if shape is not None:
        return shape[0]
    for name, entry in entries.items():
        dim = told.get(name, 0)
        if isinstance(entry, Tensor) and dim is not None and -entry.ndim <= dim < entry.ndim:
            return entry.shape[dim]
    raise InvalidArgumentError(
        "a global batch has a tensor whose dim 0 is rows, such as input_ids [B, L]; what came has "
        f"{', '.join(map(str, entries)) or 'nothing'}"
    )


def first_entry(entries: Mapping[str, Any], arguments: Iterable[str], model: str) -> str:
    """Return the entry that a model's forward is given as its first argument.

    Args:
        entries: By name.
        arguments: Of the forward, in its order.
        model: Its name, for messages.

    Raises:
        InvalidArgumentError: The batch has no such entry.
    """
    if TOKENS in entries:
        return TOKENS
    names = [*arguments]
    if names and names[0] in entries:
        return names[0]
    raise InvalidArgumentError(
        f"the forward of {model} takes {names[0] if names else 'nothing'} first, and the batch has "
        f"{', '.join(map(str, entries)) or 'nothing'}: name an entry so, or {TOKENS}"
    )

"""The entries of a batch: by name, how many rows and positions, and the one a model is given first.

A model of tokens has `input_ids` [B, L], whose columns are positions of sequences. Any other model
has the first argument of its forward; which of its dims are positions nobody knows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

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


# Of batches without input_ids: entries whose positions are known by their name.
_KNOWN = {"inputs_embeds": 1}
_ALIKE = {"labels": 1, "attention_mask": 1, "token_type_ids": 1, "position_ids": -1}


class Positions(NamedTuple):
    """The positions of a batch.

    Attributes:
        length: Of every sequence.
        dims: The dim of positions of each entry that is not [B, L] beside `input_ids`.
        whole: Entries that stay whole although they are [B, L].
    """

    length: int
    dims: Mapping[str, int]
    whole: frozenset[str] = frozenset()


def read_sequence_dims(
    entries: Mapping[str, Any], told: Mapping[str, int | None] | None
) -> Positions | None:
    """Return the positions of a batch; None if they are not known.

    Args:
        entries: By name.
        told: Dims that the caller names; None for an entry that has no positions.

    Raises:
        InvalidArgumentError: An entry or a dim that does not exist, or dims of several lengths.
    """
    told = _checked(told, entries)
    shape = sequence_shape(entries)
    known = {} if shape is not None else {n: d for n, d in _KNOWN.items() if n in entries}
    dims = {name: dim for name, dim in {**known, **told}.items() if dim is not None}
    lengths = {name: entries[name].shape[dim] for name, dim in dims.items()}
    if shape is not None:
        dims = {name: dim for name, dim in dims.items() if entries[name].shape != shape}
        lengths = {TOKENS: shape[1], **lengths}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{size} of {name}" for name, size in lengths.items())
        raise InvalidArgumentError(
            f"sequences of one batch have one length, and sequence_dims names dims of {shown}: "
            "name None for what is not to be divided"
        )
    if not lengths:
        return None
    length = next(iter(lengths.values()))
    whole = frozenset(name for name, dim in told.items() if dim is None)
    if shape is None:
        dims |= {
            name: dim
            for name, dim in _ALIKE.items()
            if name not in told and _is_as_long(entries.get(name), dim, length)
        }
    return Positions(length, dims, whole)


def require_all_told(entries: Mapping[str, Any], found: Positions) -> None:
    """Refuse an unnamed entry that has a dim as long as the sequences.

    If that dim is positions, the entry would stay whole beside outputs of this rank's positions.

    Raises:
        InvalidArgumentError: There is one.
    """
    known = {*found.dims, *found.whole, *_ALIKE}
    for name, x in entries.items():
        if name in known or not isinstance(x, Tensor):
            continue
        dims = [dim for dim in range(1, x.ndim) if x.shape[dim] == found.length]
        if dims:
            ways = [*dims, None]
            raise InvalidArgumentError(
                f"cp divides {found.length} positions, and {name} is {list(x.shape)}: say whether "
                "they are its own, shard_global_batch(..., sequence_dims="
                + " or ".join(f"{{{name!r}: {way}}}" for way in ways)
                + "); None leaves it whole"
            )


def _checked(
    told: Mapping[str, int | None] | None, entries: Mapping[str, Any]
) -> Mapping[str, int | None]:
    if not isinstance(told, Mapping | None):
        raise InvalidArgumentError(
            "sequence_dims is a mapping from names of entries to their dim of positions, or None, "
            f"got {type(told).__name__}"
        )
    for name, dim in (told or {}).items():
        x = entries.get(name)
        if not isinstance(x, Tensor):
            raise InvalidArgumentError(
                f"sequence_dims names {name}, and the batch's tensors are "
                f"{', '.join(n for n, x in entries.items() if isinstance(x, Tensor))}"
            )
        if dim is not None and not (isinstance(dim, int) and -x.ndim <= dim < x.ndim):
            raise InvalidArgumentError(
                f"sequence_dims={{{name!r}: {dim!r}}} does not fit: {name} is {list(x.shape)}"
            )
        if name == TOKENS and dim not in (1, -1):
            raise InvalidArgumentError(f"the positions of {TOKENS} [B, L] are dim 1, not {dim}")
    return told or {}


def _is_as_long(x: Any, dim: int, length: int) -> bool:
    return isinstance(x, Tensor) and x.ndim > 1 and x.shape[dim] == length

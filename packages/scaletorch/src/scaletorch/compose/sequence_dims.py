"""The dim of each entry of a batch that is positions of a sequence, which cp divides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..dist.errors import InvalidArgumentError
from .entries import TOKENS, sequence_shape

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

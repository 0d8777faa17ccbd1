"""Which dim of each entry of a global batch is its rows; an entry without rows is passed whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..dist.errors import InvalidArgumentError
from ..parallel.context_parallel.building import CU_SEQLENS
from .entries import OF_LOSS, row_count, sequence_shape

RowDims = Mapping[str, int | None]
Shape = tuple[int, ...]

POSITIONS = "position_ids"
_TOKENS = ("input_ids", "labels", "token_type_ids")  # [B, L], whatever B and L are
_NUMBERS = bool | int | float | str | None


def read_row_dims(batch: Mapping[str, Any], told: RowDims | None) -> dict[str, int | None]:
    """Return for every entry of a global batch the dim that is rows, or None if it has no rows.

    Args:
        batch: Entries by name, such as `input_ids` [B, L].
        told: Dims that the caller names; they go before what shapes suggest.

    Raises:
        InvalidArgumentError: An entry's shape does not tell, or allows two readings; or the caller
            names an entry or a dim that does not exist.
    """
    told = _checked(told)
    tokens: Shape = sequence_shape(batch) or (row_count(batch, told),)
    if strangers := [name for name in told if name not in batch]:
        raise InvalidArgumentError(
            f"row_dims names {', '.join(map(str, strangers))}, and the batch has only "
            f"{', '.join(batch)}"
        )
    return {
        name: _told(name, entry, told[name], tokens)
        if name in told
        else _row_dim(name, entry, tokens)
        for name, entry in batch.items()
    }


def _checked(told: RowDims | None) -> RowDims:
    if not isinstance(told, Mapping | None):
        raise InvalidArgumentError(
            "row_dims is a mapping from names of entries to their dim of rows, or None, got "
            f"{type(told).__name__}"
        )
    return told or {}


def _told(name: str, entry: Any, dim: int | None, tokens: Shape) -> int | None:
    """Return the dim that the caller names, counted from the front."""
    fixed = name in _TOKENS[:2] and len(tokens) > 1
    if dim is None and not fixed:
        return None
    ndim = entry.ndim if isinstance(entry, Tensor) else 0
    there = isinstance(dim, int) and -ndim <= dim < ndim
    if dim is None or not there or entry.shape[dim] != tokens[0] or (fixed and dim):
        raise InvalidArgumentError(
            f"row_dims={{{name!r}: {dim}}} does not fit: {name} {_came(entry)}, and the batch has "
            f"{tokens[0]} rows" + f", which are dim 0 of {name}" * fixed
        )
    return dim % ndim


def _row_dim(name: str, entry: Any, tokens: Shape) -> int | None:
    """Return the dim of rows that an entry's name and shape tell."""
    if name in CU_SEQLENS or isinstance(entry, _NUMBERS):
        return None
    if not isinstance(entry, Tensor):
        raise _unknown(name, entry, tokens)
    shape, rows = tuple(entry.shape), tokens[0]
    if name == "labels" and len(tokens) > 1:
        _require_token_labels(shape, tokens)
    if name == POSITIONS and len(tokens) > 1:
        return _row_dim_of_positions(entry, tokens)
    if name.startswith(OF_LOSS):
        _require_rows_of_loss(name, shape, rows)
        return 0
    if not shape or (shape[0] == 1 and rows > 1):  # a number, or the same for all rows
        return None
    if shape[0] != rows:
        raise _unknown(name, entry, tokens)
    square = tokens[1:] == (rows,) and rows > 1 and (len(shape) <= 2 or shape[1] == rows)
    if square and name not in _TOKENS:
        raise _ambiguous(
            name, shape, f"dim 0 is the {rows} rows", f"dim 0 is the {rows} positions", 0, None
        )
    return 0


def _row_dim_of_positions(entry: Tensor, tokens: Shape) -> int | None:
    """Return the dim of rows of `position_ids`; with several axes (time, height, width) it is 1."""
    shape, rows = tuple(entry.shape), tokens[0]
    if shape == tokens:
        return 0
    if len(shape) not in (2, 3) or shape[-2:] not in {tokens, (1, tokens[1])}:
        raise InvalidArgumentError(
            f"{POSITIONS} {_came(entry)}: with these input_ids they are {list(tokens)}, "
            f"[1, {tokens[1]}], or for positions of several axes [axes, {rows}, {tokens[1]}]"
        )
    if len(shape) == 3 and shape[0] == shape[1] == rows > 1:
        raise _ambiguous(
            POSITIONS, shape, f"rows lie behind {rows} axes of positions", "rows come first", 1, 0
        )
    return None if shape[-2] == 1 else len(shape) - 2


def _require_token_labels(shape: Shape, tokens: Shape) -> None:
    if shape != tokens:
        raise InvalidArgumentError(
            f"labels have shape {list(shape)}, and they are one for each token, {list(tokens)}; "
            f"name the target of a row, or any other, {OF_LOSS}labels, [{tokens[0]}, ...]: a "
            f"loss_fn reads it as micro_batch['{OF_LOSS}labels'], and count_fn counts it"
        )


def _require_rows_of_loss(name: str, shape: Shape, rows: int) -> None:
    if shape[:1] != (rows,):
        raise InvalidArgumentError(
            f"{name} has shape {list(shape)}, and entries of a loss have a row for each of "
            f"the {rows} sequences: [{rows}, ...]; give loss_fn itself what is of no sequence, "
            f"or pass it whole, row_dims={{{name!r}: None}}"
        )


def _ambiguous(
    name: str, shape: Shape, first: str, second: str, dim: int | None, other: int | None
) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{name} has shape {list(shape)}, which can be read in two ways: {first} of the batch, or "
        f"{second}. Say which: shard_global_batch(..., row_dims={{{name!r}: {dim}}}) or "
        f"row_dims={{{name!r}: {other}}}; None passes it whole to every micro-batch"
    )


def _unknown(name: str, entry: Any, tokens: Shape) -> InvalidArgumentError:
    shape = tuple(entry.shape) if isinstance(entry, Tensor) else ()
    dims = [dim for dim, size in enumerate(shape) if size == tokens[0]]
    ways = [*(f"row_dims={{{name!r}: {dim}}}" for dim in dims), f"row_dims={{{name!r}: None}}"]
    return InvalidArgumentError(
        f"{name} {_came(entry)}, and dim 0 of an entry is the {tokens[0]} rows of the batch. Say "
        f"where its rows are, or pass it whole to every micro-batch: "
        f"shard_global_batch(..., {' or '.join(ways)})"
    )


def _came(entry: Any) -> str:
    if isinstance(entry, Tensor):
        return f"has shape {list(entry.shape)}"
    return f"is a {type(entry).__name__}"

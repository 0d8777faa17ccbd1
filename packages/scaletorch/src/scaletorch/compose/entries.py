"""Read a batch: the names of its entries, their dims of rows and positions, and the model's input.

A model of tokens takes `input_ids` [B, L], whose columns are positions of sequences. Any other
model takes the first argument of its forward, whose dims of positions are not known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..dist.errors import InvalidArgumentError
from ..parallel.context_parallel.building import CU_SEQLENS

TOKENS, LABELS = "input_ids", "labels"
POSITIONS = "position_ids"
OF_LOSS = "loss_"  # prefix of entries for the loss, which the model does not get
RowDims = Mapping[str, int | None]
Shape = tuple[int, ...]
_TOKENS = ("input_ids", "labels", "token_type_ids")  # always [B, L]: dim 0 is rows even if B = L
_NUMBERS = bool | int | float | str | None


def named_entries(batch: Any, arguments: Iterable[str] | None) -> dict[str, Any]:
    """Return a batch's entries by name; a tuple has forward's first `arguments`, perhaps labels."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return dict(zip(batch._fields, batch, strict=True))
    if not isinstance(batch, tuple | list):
        raise InvalidArgumentError(
            "a global batch is a mapping from names of forward's arguments to tensors, a dataclass "
            f"or a tuple, got a {type(batch).__name__}"
        )
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
    """Return the shape [B, L] of a batch of tokens; None if it has no `input_ids`."""
    ids = entries.get(TOKENS)
    if ids is None:
        return None
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        came = f"has the shape {list(ids.shape)}" if isinstance(ids, Tensor) else f"is {ids!r:.40}"
        raise InvalidArgumentError(
            f"{TOKENS} {came}, and must be tokens [B, L]: give anything else the name of the first "
            "argument of the model's forward"
        )
    return ids.shape[0], ids.shape[1]


def row_count(entries: Mapping[str, Any], named: RowDims) -> int:
    """Return the number of rows of `input_ids`, or of the first tensor with rows."""
    shape = sequence_shape(entries)
    if shape is not None:
        return shape[0]
    for name, entry in entries.items():
        dim = named.get(name, 0)
        if isinstance(entry, Tensor) and dim is not None and -entry.ndim <= dim < entry.ndim:
            return entry.shape[dim]
    raise InvalidArgumentError(
        "a global batch needs a tensor whose dim 0 is rows, such as input_ids [B, L]; this one has "
        f"{', '.join(map(str, entries)) or 'nothing'}"
    )


def first_entry(entries: Mapping[str, Any], arguments: Iterable[str], model: str) -> str:
    """Return the name of the entry that is the first argument of a model's forward."""
    if TOKENS in entries:
        return TOKENS
    names = [*arguments]
    if names and names[0] in entries:
        return names[0]
    raise InvalidArgumentError(
        f"the forward of {model} takes {names[0] if names else 'nothing'} first, and the batch has "
        f"{', '.join(map(str, entries)) or 'nothing'}: give an entry that name, or {TOKENS}"
    )


def read_row_dims(batch: Mapping[str, Any], named: RowDims | None) -> dict[str, int | None]:
    """Return the dim of rows of every entry, as the caller or its shape names it; None for none."""
    named = _named_dims("row_dims", named, batch)
    tokens: Shape = sequence_shape(batch) or (row_count(batch, named),)
    found: dict[str, int | None] = {}
    for name, entry in batch.items():
        dim = named[name] if name in named else _row_dim(name, entry, tokens)
        fixed = name in _TOKENS[:2] and len(tokens) > 1
        if name in named and (
            (dim is not None and entry.shape[dim] != tokens[0]) or (fixed and dim != 0)
        ):
            raise InvalidArgumentError(
                f"row_dims={{{name!r}: {dim}}} does not fit: {name} {_came(entry)}, and the batch "
                f"has {tokens[0]} rows" + f", which are dim 0 of {name}" * fixed
            )
        found[name] = dim if dim is None else dim % entry.ndim
    return found


def _named_dims(argument: str, named: RowDims | None, entries: Mapping[str, Any]) -> RowDims:
    """Return the dims that the caller names, if the entries have them."""
    if not isinstance(named, Mapping | None):
        raise InvalidArgumentError(
            f"{argument} is a mapping from names of entries to a dim or None, got "
            f"{type(named).__name__}"
        )
    for name, dim in (named or {}).items():
        if name not in entries:
            raise InvalidArgumentError(
                f"{argument} names {name}, and the batch has only {', '.join(entries)}"
            )
        ndim = entries[name].ndim if isinstance(entries[name], Tensor) else 0
        if dim is not None and not (isinstance(dim, int) and -ndim <= dim < ndim):
            raise InvalidArgumentError(
                f"{argument}={{{name!r}: {dim!r}}} does not fit: {name} {_came(entries[name])}"
            )
    return named or {}


def _row_dim(name: str, entry: Any, tokens: Shape) -> int | None:
    """Return the dim of rows that follows from an entry's name and shape."""
    if name in CU_SEQLENS or isinstance(entry, _NUMBERS):
        return None
    if not isinstance(entry, Tensor):
        raise _unclear("row_dims", name, entry, tokens[0], None)
    shape, rows = tuple(entry.shape), tokens[0]
    if name == LABELS and len(tokens) > 1 and shape != tokens:
        raise InvalidArgumentError(
            f"labels have shape {list(shape)}, and they are one for each token, {list(tokens)}; "
            f"give any other target the name {OF_LOSS}labels, [{rows}, ...]: a loss_fn reads it "
            f"as micro_batch['{OF_LOSS}labels'], and count_fn counts it"
        )
    if name == POSITIONS and len(tokens) > 1:
        return _row_dim_of_positions(entry, tokens)
    same_for_all = not shape or (shape[0] == 1 and rows > 1)  # a 0-d tensor, or one value
    if same_for_all and not name.startswith(OF_LOSS):
        return None
    if shape[:1] != (rows,):
        dims = [dim for dim, size in enumerate(shape) if size == rows]
        raise _unclear("row_dims", name, entry, rows, *dims, None)
    square = tokens[1:] == (rows,) and rows > 1 and (len(shape) <= 2 or shape[1] == rows)
    if square and name not in _TOKENS and not name.startswith(OF_LOSS):
        raise _unclear("row_dims", name, entry, rows, 0, None)
    return 0


def _row_dim_of_positions(entry: Tensor, tokens: Shape) -> int | None:
    """Return the dim of rows of `position_ids`: 1 with several axes, else 0; None if whole."""
    shape, rows = tuple(entry.shape), tokens[0]
    if shape == tokens:
        return 0
    if len(shape) not in (2, 3) or shape[-2:] not in {tokens, (1, tokens[1])}:
        raise InvalidArgumentError(
            f"{POSITIONS} {_came(entry)}: with these input_ids they are {list(tokens)}, "
            f"[1, {tokens[1]}], or for positions of several axes [axes, {rows}, {tokens[1]}]"
        )
    if len(shape) == 3 and shape[0] == shape[1] == rows > 1:
        raise _unclear("row_dims", POSITIONS, entry, rows, 1, 0)
    return None if shape[-2] == 1 else len(shape) - 2


def _unclear(
    argument: str, name: str, entry: Any, size: int, *dims: int | None
) -> InvalidArgumentError:
    """Return an error that asks the caller to choose the dim of rows or positions."""
    what = "rows of the batch" if argument == "row_dims" else "positions that cp divides"
    ways = " or ".join(f"{argument}={{{name!r}: {dim}}}" for dim in dims)
    return InvalidArgumentError(
        f"{name} {_came(entry)}, and it is not clear whether, or in which dim, it has the {size} "
        f"{what}: call shard_global_batch(..., {ways}); None leaves it whole"
    )


def _came(entry: Any) -> str:
    if isinstance(entry, Tensor):
        return f"has shape {list(entry.shape)}"
    return f"is a {type(entry).__name__}"


# Dims of positions in batches without input_ids: known by name, or if the length fits.
_KNOWN = {"inputs_embeds": 1}
_ALIKE = {"labels": 1, "attention_mask": 1, "token_type_ids": 1, "position_ids": -1}


class Positions(NamedTuple):
    """The positions of a batch."""

    length: int
    dims: Mapping[str, int]  # except of entries [B, L] next to `input_ids`
    whole: frozenset[str] = frozenset()  # entries that stay whole, even if they are [B, L]


def read_sequence_dims(entries: Mapping[str, Any], named: RowDims | None) -> Positions | None:
    """Return the positions of a batch, from the caller's dims and known names; or None."""
    named = _named_dims("sequence_dims", named, entries)
    if named.get(TOKENS, 1) not in (1, -1):
        raise InvalidArgumentError(f"the positions of {TOKENS} [B, L] are dim 1")
    shape = sequence_shape(entries)
    known = {} if shape is not None else {n: d for n, d in _KNOWN.items() if n in entries}
    dims = {name: dim for name, dim in {**known, **named}.items() if dim is not None}
    lengths = {name: entries[name].shape[dim] for name, dim in dims.items()}
    if shape is not None:
        dims = {name: dim for name, dim in dims.items() if entries[name].shape != shape}
        lengths = {TOKENS: shape[1], **lengths}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{size} of {name}" for name, size in lengths.items())
        raise InvalidArgumentError(
            f"all sequences of a batch must have one length, and sequence_dims names dims of "
            f"{shown}: name None for an entry that cp must not divide"
        )
    if not lengths:
        return None
    length = next(iter(lengths.values()))
    whole = frozenset(name for name, dim in named.items() if dim is None)
    if shape is None:
        dims |= {
            name: dim
            for name, dim in _ALIKE.items()
            if name not in named and isinstance(x := entries.get(name), Tensor)
            if x.ndim > 1 and x.shape[dim] == length
        }
    return Positions(length, dims, whole)


def require_all_told(entries: Mapping[str, Any], found: Positions) -> None:
    """Refuse an entry with a dim as long as the sequences that the caller has not named."""
    known = {*found.dims, *found.whole, *_ALIKE}
    for name, x in entries.items():
        if name in known or not isinstance(x, Tensor):
            continue
        dims = [dim for dim in range(1, x.ndim) if x.shape[dim] == found.length]
        if dims:
            raise _unclear("sequence_dims", name, x, found.length, *dims, None)

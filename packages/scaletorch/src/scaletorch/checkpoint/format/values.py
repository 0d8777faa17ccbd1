"""Plain values as JSON and back: what optimizers, schedulers and users keep beside tensors."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...dist.errors import InvalidArgumentError

_PLAIN = (str, int, float, bool, type(None))
_MARKS = {"tuple", "pairs", "tensor"}
_DEPTH = 90  # lists and mappings in one another, of JSON; more cannot be told to other ranks


def encode(value: Any, where: str) -> Any:
    """Return what JSON keeps of a value: tuples, keys that are no strings, and 0-d tensors too.

    Raises:
        InvalidArgumentError: It is something else, or too deep; `where` says whose.
    """
    try:
        encoded = _encode(value, where)
        check_depth(encoded)
    except (RecursionError, ValueError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(
            f"{where} holds containers more than {_DEPTH} deep in one another, which a checkpoint "
            "does not"
        ) from None
    return encoded


def _encode(value: Any, where: str) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list):
        return [_encode(each, where) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_encode(each, where) for each in value]}
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value) and not _MARKS & set(value):
            return {key: _encode(each, f"{where}[{key!r}]") for key, each in value.items()}
        pairs = [[_encode(key, where), _encode(each, where)] for key, each in value.items()]
        return {"pairs": pairs}
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex():
        return {"tensor": value.item(), "dtype": dtype_name(value.dtype)}
    kind = f"{value.ndim}-d tensor" if isinstance(value, Tensor) else type(value).__name__
    raise InvalidArgumentError(
        f"{where} is a {kind}, or holds one, which a checkpoint does not; it holds numbers, "
        "strings, None, 0-d tensors, and lists, tuples and mappings of these"
    )


def check_depth(value: Any) -> None:
    """Refuse JSON whose containers lie too deep in one another.

    Raises:
        ValueError: They do.
    """
    level = [value]
    for _ in range(_DEPTH + 1):
        level = [inner for each in level for inner in _inside(each)]
        if not level:
            return
    raise ValueError(f"containers lie in one another more than {_DEPTH} deep")


def _inside(value: Any) -> Iterable[Any]:
    """Return the containers in a container."""
    inside = value.values() if isinstance(value, dict) else value
    rows = isinstance(value, dict | list)
    return [each for each in inside if isinstance(each, dict | list)] if rows else ()


def is_number(value: object) -> bool:
    """Return whether a value is a number, or a real tensor of one."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)


def is_nan(value: object) -> bool:
    """Return whether a number, or one in a list or tuple, is NaN."""
    if isinstance(value, list | tuple):
        return any(map(is_nan, value))
    return is_number(value) and math.isnan(float(value))  # type: ignore[arg-type]


def decode(value: Any) -> Any:
    """Return the value that `encode` was given.

    Raises:
        TypeError: It gave no such JSON.
        ValueError: The same.
        RuntimeError: The same.
        LookupError: The same.
    """
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(decode(each) for each in value["tuple"])
    if "pairs" in value:
        return {decode(key): decode(each) for key, each in value["pairs"]}
    if "tensor" in value:
        if not isinstance(value["tensor"], int | float):
            raise TypeError(f"{value['tensor']!r:.60} is no number")
        return torch.tensor(value["tensor"], dtype=named_dtype(value["dtype"]))
    return {key: decode(each) for key, each in value.items()}


def like(current: Any, value: Any) -> Any:
    """Return a decoded value with the containers and devices of the one that it replaces."""
    if isinstance(current, Counter):
        return Counter(value)
    if isinstance(current, dict) and isinstance(value, dict):
        return {key: like(current.get(key), each) for key, each in value.items()}
    rows = isinstance(current, list | tuple) and isinstance(value, list | tuple)
    if rows and len(current) == len(value):
        return type(value)(like(*pair) for pair in zip(current, value, strict=True))
    if isinstance(current, int | float) and isinstance(value, Tensor):
        return value.item()
    if isinstance(current, Tensor) and isinstance(value, int | float):
        return torch.full_like(current, value)
    if isinstance(current, Tensor) and isinstance(value, Tensor):
        return value.to(current.device)
    return value


def kind_of(value: Any) -> str | None:
    """Return the name of an optimizer's or a scheduler's class; None if there is none."""
    return None if value is None else type(value).__name__


def canonical(value: Any) -> str:
    """Return the one JSON text of a value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def named_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name.

    Raises:
        TypeError: There is none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return dtype

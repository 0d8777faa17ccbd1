"""Plain values as JSON and back: those that optimizers, schedulers and users keep."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...dist.errors import InvalidArgumentError

_PLAIN = (str, int, float, bool, type(None))
_MARKS = {"tuple", "pairs", "tensor"}


def encode(value: Any, where: str) -> Any:
    """Convert a value to JSON types, with marks for tuples, other keys and 0-d tensors."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list):
        return [encode(each, where) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(each, where) for each in value]}
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value) and not _MARKS & set(value):
            return {key: encode(each, f"{where}[{key!r}]") for key, each in value.items()}
        pairs = [[encode(key, where), encode(each, where)] for key, each in value.items()]
        return {"pairs": pairs}
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex():
        return {"tensor": value.item(), "dtype": dtype_name(value.dtype)}
    kind = f"{value.ndim}-d tensor" if isinstance(value, Tensor) else type(value).__name__
    raise InvalidArgumentError(
        f"{where} contains a {kind}, and a checkpoint stores only numbers, strings, None, 0-d "
        "tensors, and lists, tuples and mappings of these"
    )


def decode(value: Any) -> Any:
    """Convert the result of `encode` back to the value."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(decode(each) for each in value["tuple"])
    if "pairs" in value:
        return {decode(key): decode(each) for key, each in value["pairs"]}
    if "tensor" in value:
        return torch.tensor(value["tensor"], dtype=named_dtype(value["dtype"]))
    return {key: decode(each) for key, each in value.items()}


def like(current: Any, value: Any) -> Any:
    """Return a decoded value with the container types and devices of the value it replaces."""
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


def canonical(value: Any) -> str:
    """Return a value's canonical JSON text, the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def named_dtype(name: str) -> torch.dtype:
    """Return the dtype with a name such as `float32`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype")
    return dtype

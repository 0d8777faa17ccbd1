"""Find and replace tensors inside containers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value: the value itself, or those inside it at any depth.

    It looks into tuples, lists, mappings and dataclasses, and skips anything else.
    """
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        value = value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    elif not isinstance(value, tuple | list):
        return
    for each in value:
        yield from tensors_in(each)


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a value with each tensor that `tensors_in` yields replaced.

    Args:
        change: Called with each tensor; returns its replacement.
        value: A tensor, or a value that contains tensors at any depth.

    Returns:
        New containers of the same types; anything else inside them is kept as it is.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return _like(value, enumerate([map_tensors(change, each) for each in value]))
    if isinstance(value, Mapping):
        return _like(value, [(key, map_tensors(change, each)) for key, each in value.items()])
    if is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in fields(value):  # object.__setattr__ also sets fields of a frozen dataclass
            each = map_tensors(change, getattr(value, field.name))
            object.__setattr__(made, field.name, each)
        return made
    return value


def _like(data: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """Return a container of the same type with other entries."""
    if isinstance(data, MutableMapping):
        filled = copy.copy(data)  # keeps a subclass's own state, such as defaultdict's factory
        for key, value in items:  # some forbid `update`, such as outputs of transformers
            filled[key] = value
        return filled
    if isinstance(data, Mapping):
        return type(data)(dict(items))  # type: ignore[call-arg]
    values = [value for _, value in items]
    return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)

"""Tensors inside containers: finding and changing them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of arguments or of a result: itself, or those inside, at any depth.

    That is in tuples, lists, mappings and dataclasses. Anything else is passed over.
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
    """Return arguments, or a result, with the tensors that `tensors_in` yields changed.

    Args:
        change: Called with each tensor; returns what takes its place.
        value: A tensor, or something with tensors in it at any depth.

    Returns:
        New containers of the same types; all that is neither tensor nor container as it is.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return _like(value, enumerate([map_tensors(change, each) for each in value]))
    if isinstance(value, Mapping):
        return _like(value, [(key, map_tensors(change, each)) for key, each in value.items()])
    if is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in fields(value):  # set behind a frozen one's back, without its __init__
            each = map_tensors(change, getattr(value, field.name))
            object.__setattr__(made, field.name, each)
        return made
    return value


def _like(data: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """Return a container like another one, with these entries instead."""
    if isinstance(data, MutableMapping):
        filled = copy.copy(data)  # keeps what a subclass has of its own, as defaultdict does
        for key, value in items:  # some refuse update, as the outputs of transformers do
            filled[key] = value
        return filled
    if isinstance(data, Mapping):
        return type(data)(dict(items))  # type: ignore[call-arg]
    values = [value for _, value in items]
    return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)

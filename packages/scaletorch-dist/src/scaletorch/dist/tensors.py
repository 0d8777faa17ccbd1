"""Find and replace tensors inside containers, and compare tensors so that no error is missed.

Python's `max` skips a NaN that is not first, `NaN > bound` is false, different shapes broadcast,
and the maximum over no errors looks small. In this module a non-finite value is an infinite
error, and an empty comparison raises.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from .errors import InvalidArgumentError


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value: the value itself, or those inside it at any depth.

    It looks into tuples, lists, mappings and dataclasses, and skips anything else.
    """
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, tuple | list):  # first: the check of `Mapping` is slow
        pass
    elif isinstance(value, Mapping):
        value = value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    else:
        return
    for item in value:
        yield from tensors_in(item)


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
        return _like(value, enumerate([map_tensors(change, item) for item in value]))
    if isinstance(value, Mapping):
        return _like(value, [(key, map_tensors(change, item)) for key, item in value.items()])
    if is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for field in fields(value):  # object.__setattr__ also sets fields of a frozen dataclass
            item = map_tensors(change, getattr(value, field.name))
            object.__setattr__(result, field.name, item)
        return result
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


def worst(errors: Iterable[float | Tensor]) -> float:
    """Return the largest of `errors`; infinity if one is NaN or negative.

    Args:
        errors: Numbers, or tensors of one element.

    Raises:
        InvalidArgumentError: `errors` is empty: nothing was compared.

    Example:
        >>> worst([1e-16, float("nan")]) < 1e-12
        False
    """
    found = [value if value >= 0 else math.inf for value in map(float, errors)]
    if not found:
        raise InvalidArgumentError("expected at least one error, got none: nothing was compared")
    return max(found)


def relative_error(actual: Tensor, expected: Tensor, *, scale: Tensor | None = None) -> float:
    """Return the largest absolute difference divided by the largest absolute expected value.

    Args:
        actual: The tensor to check, of any dtype and shape.
        expected: The reference, of the same shape. If it is all zero, the error is 0 for an
            all-zero `actual`, else infinity.
        scale: A tensor whose largest value to divide by instead, if `expected` is a slice of it.

    Returns:
        The error, computed in float64; infinity if either tensor has a NaN or an infinity, and 0
        for tensors without elements.

    Raises:
        InvalidArgumentError: The shapes differ.
    """
    if actual.shape != expected.shape:
        raise InvalidArgumentError(
            f"expected a tensor of shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
        )
    if not actual.numel():
        return 0.0
    actual, expected = actual.detach().double(), expected.detach().double()
    gap = (actual - expected).abs().max().item()
    size = (expected if scale is None else scale.detach().double()).abs().max().item()
    if not (math.isfinite(gap) and math.isfinite(size)):
        return math.inf
    if not size:
        return math.inf if gap else 0.0
    return gap / size

"""Errors between tensors that no comparison can miss.

Python's `max` skips a NaN that is not first, `NaN > bound` is false, different shapes broadcast,
and the maximum over no errors looks small. Here a non-finite value is an infinite error, and an
empty comparison raises.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from .errors import InvalidArgumentError


def worst(errors: Iterable[float | Tensor]) -> float:
    """Return the largest of `errors`; infinity if one is NaN or negative.

    Args:
        errors: Numbers, or tensors of one element.

    Raises:
        InvalidArgumentError: There are no errors: nothing was compared.

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

"""Distances between tensors, in numbers with which a comparison can fail.

Python's `max` passes over a NaN that is not first, `NaN > bound` is false, shapes that differ
broadcast, and the largest of no errors is small. Here what is not finite is infinitely far off,
and nothing at all is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from .errors import InvalidArgumentError


def worst(errors: Iterable[float | Tensor]) -> float:
    """Return the largest of `errors`; infinity if one is NaN or below zero.

    Args:
        errors: What differences came to, each of one element.

    Raises:
        InvalidArgumentError: There are none: nothing was compared.

    Example:
        >>> worst([1e-16, float("nan")]) < 1e-12
        False
    """
    found = [value if value >= 0 else math.inf for value in map(float, errors)]
    if not found:
        raise InvalidArgumentError("expected at least one error, got none: nothing was compared")
    return max(found)


def relative_error(actual: Tensor, expected: Tensor, *, scale: Tensor | None = None) -> float:
    """Return the largest difference of two tensors over the largest expected value.

    Args:
        actual: What was found, of any dtype and shape.
        expected: What should have been found, of the same shape; zero where all of it is zero is
            no difference, and anything else is an infinite one.
        scale: The tensor whose largest value is meant, if `expected` is a part of it.

    Returns:
        The error in float64's range; infinity where either tensor has a NaN or an infinity, and 0
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

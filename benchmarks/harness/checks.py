"""The check that a way computes the same as the others; a wrong result's time means nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over that of `expected`."""
    exact = expected.double()
    return float((found.double() - exact).norm() / exact.norm())


def check(name: object, found: Sequence[Tensor], expected: Sequence[Tensor], bound: float) -> None:
    """Stop if a way's result differs from one process's.

    Raises:
        SystemExit: A tensor is off by more than `bound`, or has a NaN.
    """
    for mine, theirs in zip(found, expected, strict=True):
        error = distance(mine, theirs)
        if not error <= bound:  # also true for NaN
            raise SystemExit(f"{name} is wrong by {error:.1e}")

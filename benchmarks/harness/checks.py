"""Whether a way computes the same as the others: a figure of a wrong result is worth nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over that of `expected`."""
    exact = expected.double()
    return float((found.double() - exact).norm() / exact.norm())


def check(name: object, found: Sequence[Tensor], expected: Sequence[Tensor], bound: float) -> None:
    """Stop if a way computes something else than one process.

    Raises:
        SystemExit: A tensor is further off than `bound`, or has a NaN.
    """
    for mine, theirs in zip(found, expected, strict=True):
        error = distance(mine, theirs)
        if not error <= bound:  # a NaN is not
            raise SystemExit(f"{name} is wrong by {error:.1e}")

"""Latency and bandwidth of each call from its times: seconds = alpha + beta · bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .cases import CASES
from .measure import Row


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return alpha (seconds) and beta (seconds per byte), neither of them negative.

    They minimise the squares of the *relative* errors: absolute ones would see the largest sizes
    alone, and leave alpha to their noise.

    Args:
        sizes: Bytes.
        seconds: The time of each, above 0.
    """
    weights = [1 / time**2 for time in seconds]
    total = sum(weights)
    centre = sum(w * x for w, x in zip(weights, sizes, strict=True)) / total
    mean = sum(w * t for w, t in zip(weights, seconds, strict=True)) / total
    spread = sum(w * (x - centre) ** 2 for w, x in zip(weights, sizes, strict=True))
    if spread == 0:
        return mean, 0.0
    rows = zip(weights, sizes, seconds, strict=True)
    beta = sum(w * (x - centre) * (t - mean) for w, x, t in rows) / spread
    if beta < 0:
        return mean, 0.0
    alpha = mean - beta * centre
    if alpha < 0:
        products = zip(weights, sizes, seconds, strict=True)
        squares = sum(w * x * x for w, x in zip(weights, sizes, strict=True))
        return 0.0, sum(w * x * t for w, x, t in products) / squares
    return alpha, beta


def constants(rows: Sequence[Row], ranks: int) -> dict[str, dict[str, Any]]:
    """Return what a planner needs of each call.

    Args:
        rows: Of all calls.
        ranks: In the group that they were measured on.

    Returns:
        By call: `alpha` (seconds) and `beta` (seconds per byte of the call's size), for this
        number of ranks; `alpha_step` and `beta_bus`, the same for one step of its algorithm and
        one byte on the busiest link, to predict another number of ranks: seconds =
        alpha_step · steps + beta_bus · factor · bytes; and `error`, the root mean square of the
        relative errors.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row.call for row in rows):
        own = [row for row in rows if row.call == name]
        sizes, times = [row.size for row in own], [row.seconds for row in own]
        alpha, beta = fit(sizes, times)
        pairs = zip(sizes, times, strict=True)
        errors = [(alpha + beta * size) / time - 1 for size, time in pairs]
        case = CASES[name]
        found[name] = {
            "alpha": alpha,
            "beta": beta,
            "alpha_step": alpha / case.steps(ranks),
            "beta_bus": beta / case.factor(ranks),
            "steps": case.steps(ranks),
            "factor": case.factor(ranks),
            "error": math.sqrt(sum(error**2 for error in errors) / len(errors)),
        }
    return found

"""The limit for bfloat16: a layout may lose at most 1.25 times what one process loses by rounding.

A bound from the number of additions would let every fault pass there. So one process trains in
bfloat16 and another in float64, from the same weights; their difference is the rounding loss. The
float64 process and the ranks send tokens to the experts that the bfloat16 process chose; see
`routing`. For a single tensor this loss is up to chance, so tensors of a kind are taken together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compose.summation import root_mean_square, scale_of, widest
from .compare import (
    INFINITE,
    Difference,
    Shard,
    compare_named,
    compare_tensor,
    whole,
)
from .routing import Choice, sizes

DTYPE = "bfloat16"
FACTOR = 1.25
ROOM = 4.0  # times the median error of scores

Exact = Mapping[str, Any] | None  # a step of the float64 process; None unless judging bfloat16


def compare_number(
    what: str, step: int, ours: Tensor, theirs: Tensor, limit: float, exact: Exact
) -> Difference:
    """Compare a loss or a norm with one process's, or in bfloat16 the rounding losses of both.

    By chance one process may lose nothing, so bfloat16's epsilon is always allowed.
    """
    if exact is None:
        return compare_tensor(what, step, ours, theirs, limit)
    true = float(exact[what])
    lost, allowed = (abs(float(each) - true) / (abs(true) or 1.0) for each in (ours, theirs))
    allowed = FACTOR * max(allowed, torch.finfo(torch.bfloat16).eps)
    return Difference(what, step, lost, allowed, note=f"{float(ours):.9g}, exactly {true:.9g}")


def compare_all(
    kind: str,
    step: int,
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Any],
    limit: float,
    exact: Exact,
    shard: Shard = whole,
) -> Iterator[Difference]:
    """Compare each tensor with one process's, or in bfloat16 the total rounding losses of both.

    Args:
        kind: Kind of the tensors: "gradient", "weight" or "whole weight".
        step: 0-based.
        ours: This rank's tensors, by plain names.
        theirs: One process's step.
        limit: The largest error of a tensor that rounding explains, if `exact` is None.
        exact: The float64 process's step; None compares each tensor on its own.
        shard: Takes this rank's shard of a whole tensor.
    """
    plural = f"{kind.split()[-1]}s"
    theirs = theirs[plural]
    if exact is None:
        yield from compare_named(kind, step, ours, theirs, limit, shard)
        return
    exact = exact[plural]
    typical = root_mean_square(exact.values())
    ours_lost, theirs_lost = 0.0, 0.0
    for name, tensor in ours.items():
        part = shard(name, theirs[name]) if name in theirs else None
        if part is None or (part.shape, part.dtype) != (tensor.shape, tensor.dtype):
            yield Difference(f"{kind} {name}", step, INFINITE, limit, note="not one process's")
            continue
        true, scale = widest(shard(name, exact[name])), scale_of(exact[name], typical)
        ours_lost += _distance(tensor, true, scale) ** 2
        theirs_lost += _distance(part, true, scale) ** 2
    note = "of all together, what rounding loses against float64; the bound is what it may"
    yield Difference(
        f"{kind}s", step, math.sqrt(ours_lost), FACTOR * math.sqrt(theirs_lost), note=note
    )


def _distance(tensor: Tensor, true: Tensor, scale: float) -> float:
    return float(torch.linalg.vector_norm(widest(tensor) - true)) / scale if scale else 0.0


def off(choices: Sequence[Choice], exact: Sequence[Choice]) -> float:
    """Return the error of nearly all tokens' scores, relative to the largest score in the row.

    Args:
        choices: Choices of the bfloat16 process in a step.
        exact: Choices of the float64 process in the same calls.
    """
    gaps = [
        (a.scores.double() - b.scores).abs().nan_to_num(nan=0.0).amax(1) / sizes(b.scores)
        for a, b in zip(choices, exact, strict=True)
    ]
    return ROOM * float(torch.cat(gaps).median()) if gaps else 0.0

"""Compare tensors of a layout with those of one process, up to rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..naming import listed, ranges
from ..summation import ROOM, scale_of, widest

WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
_DOUBTFUL = 30.0  # limits; a result further off is computed again, to see if it is random
_SHAKEN = 4  # number of runs with differently rounded hidden states
_SMALL_SHARE = 1e-3  # of the largest difference; smaller differences may be rounding
_FINEST = 1e-10  # least limit: float64 has no wider dtype to compare with; faults are far larger
_COARSE = 8.0  # limit in 16-bit epsilons for any tensor


@dataclass(frozen=True, slots=True)
class Finding:
    """One tensor that differs between the layout and one process."""

    order: int  # place in the run; the first difference causes the later ones
    what: str  # the tensor and its unit, in words
    error: float  # 2-norm of the difference / the tensor's scale; infinite if one is missing
    note: str  # the place or form of the difference


@dataclass(slots=True)
class Judge:
    """A comparison of tensors that records the first difference."""

    chain: int  # upper bound of the additions between the inputs and any tensor
    first: Finding | None = None
    compared: int = 0
    worst: float = 0.0  # the largest error within its bound
    coarsest: torch.dtype = torch.float64  # the narrowest that the plain model's code casts to

    def compare(
        self,
        what: str,
        ours: Tensor | None,
        theirs: Tensor | None,
        *,
        typical: float = 0.0,
        is_hidden: bool = False,
        other: Callable[[int], Tensor] | None = None,
        again: Callable[[], Tensor] | None = None,
    ) -> bool:
        """Compare a layout's tensor with one process's (None: 0); return False if that is random.

        `other` computes it in other ways, as `Call.make` does, and `again` once more; `typical` is
        the size of its elements.
        """
        self.compared += 1
        if ours is None or theirs is None:
            one = theirs if ours is None else ours
            if one is not None and bool((widest(one) != 0).any()):
                note = "the layout has none" if ours is None else "one process has none"
                self._find(what, math.inf, note)
            return True
        if ours.shape != theirs.shape:
            self._find(what, math.inf, f"{[*ours.shape]}, one process {[*theirs.shape]}")
            return True
        dtype = ours.dtype if ours.dtype in WIDER else theirs.dtype
        error = relative(ours, theirs, typical)
        base = limit = self.limit(dtype)
        doubtful = False
        if not error <= limit and other is not None and dtype in WIDER:
            wide = other(0)
            error, own = relative(ours, wide, typical), relative(theirs, wide, typical)
            limit, doubtful = max(limit, ROOM * own), own > _DOUBTFUL * limit
            for way in range(1, _SHAKEN + 1):
                if not error <= limit:
                    own = relative(other(way), theirs, typical)
                    limit = max(limit, ROOM * own)
        asks = doubtful or not error <= limit
        if asks and again is not None and not relative(again(), theirs, typical) <= base:
            return False
        if error <= limit:
            self.worst = max(self.worst, error)
        else:
            self._find(what, error, _where(ours, theirs) if is_hidden else "")
        return True

    def missing(self, why: str) -> None:
        """Record that something could not be compared on this rank, so that all units run again."""
        self._find(why, math.inf, "")

    def limit(self, dtype: torch.dtype) -> float:
        """Return the largest error that rounding explains, from the dtype and `chain` alone."""
        dtype = max(dtype, self.coarsest, key=lambda each: torch.finfo(each).eps)
        eps = torch.finfo(dtype).eps
        if dtype in (torch.float16, torch.bfloat16):
            return _COARSE * eps
        return max(eps * ROOM * math.sqrt(self.chain), _FINEST)

    def _find(self, what: str, error: float, note: str) -> None:
        if self.first is None:
            self.first = Finding(self.compared, what, error, note)


class Watch(TorchDispatchMode):
    """A dispatch mode that records collectives, and in a judge casts to a narrower dtype.

    Norms that compute in float32 cast, for example.
    """

    def __init__(self, judge: Judge | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._judge = judge
        self.communicates = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.communicates |= func.namespace in ("c10d", "_c10d_functional")
        found = func(*args, **(kwargs or {}))
        if self._judge is None:
            return found
        if func is torch.ops.aten._to_copy.default and found.is_floating_point():
            eps = torch.finfo(found.dtype).eps
            from_floats = args[0].is_floating_point() and torch.finfo(args[0].dtype).eps < eps
            if from_floats and eps > torch.finfo(self._judge.coarsest).eps:
                self._judge.coarsest = found.dtype
        return found


def relative(ours: Tensor, theirs: Tensor, typical: float = 0.0) -> float:
    """Return the 2-norm of a difference / the tensor's scale; equal infinities and NaN are 0."""
    a, b = widest(ours), widest(theirs)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = float(torch.linalg.vector_norm((a - b).masked_fill(same, 0)))
    scale = scale_of(b.masked_fill(~b.isfinite(), 0), typical)
    return 0.0 if gap == 0 else gap / scale if scale else math.inf


def _where(ours: Tensor, theirs: Tensor) -> str:
    """Describe the rows, positions and features in which tensors differ, if not in all."""
    gap = (widest(ours) - widest(theirs)).abs()
    off, found = gap > _SMALL_SHARE * gap.max(), []
    for dim, name in zip((0, 1, -1), ("rows", "positions", "features"), strict=True):
        wrong = off.movedim(dim, 0).flatten(1).any(1)
        if not bool(wrong.all()):
            found.append(f"{name} {ranges(wrong.nonzero().flatten().tolist())} of {len(wrong)}")
    return f"in {listed(found)}" if found else ""

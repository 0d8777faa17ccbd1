"""Two numbers that should be one: how far apart they are, and how far rounding may take them.

An addition is off by at most half an epsilon of the sum so far, up or down. Errors of either sign
add up as a random walk does: n additions of like terms come to about epsilon x sqrt(n) of the sum,
and parts of a computation that follow one another add their squares, the steps of a training too.
So the root of all additions between inputs and result counts, not their number (N. J. Higham,
T. Mary, A new approach to probabilistic rounding error analysis, 2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compose.summation import ROOM, root_mean_square, scale_of, widest

LARGEST = 1e-3  # a larger bound would let bfloat16 pass for float32: its rounding is 1e-3 and more


def bound(dtype: torch.dtype, chain: int, step: int) -> float:
    """Return the largest relative error that rounding explains.

    Args:
        dtype: Of the model.
        chain: Additions, see `chain_length`.
        step: 0-based; what a step's weights are off by enters the next.
    """
    return torch.finfo(dtype).eps * ROOM * math.sqrt(chain * (step + 1))


def blind(dtype: torch.dtype, chain: int, steps: int) -> str:
    """Say why no fault could be told from rounding in a dtype, or '' if one can.

    bfloat16 goes by what one process loses instead; see `lost`.
    """
    if dtype == torch.bfloat16:
        return ""
    last = bound(dtype, chain, steps - 1)
    if last <= LARGEST:
        return ""
    return (
        f"rounding of {chain} additions in {str(dtype).removeprefix('torch.')} may come to "
        f"{last:.1e} in {steps} steps, and beyond {LARGEST:.0e} a fault could pass for it: verify "
        "float64, or the same model with smaller sizes"
    )


INFINITE = float("inf")
Shard = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Difference:
    """How one tensor of a layout compares with one process's.

    Attributes:
        what: 'loss', 'norm', 'gradient NAME', 'weight NAME' and the like.
        step: 0-based.
        error: 2-norm of the difference over the tensor's scale, see `scale_of`; infinite where
            there is nothing to compare.
        bound: The largest error that rounding explains.
        note: Both values at their largest difference, or why there is nothing to compare.
        rank: Global rank that holds it.
    """

    what: str
    step: int
    error: float
    bound: float
    note: str = ""
    rank: int = 0

    @property
    def failed(self) -> bool:
        """Whether rounding does not explain it; a NaN fails."""
        return not self.error <= self.bound

    @property
    def severity(self) -> float:
        """Error in units of the bound, for sorting; NaN, of either, is worst."""
        if self.failed:
            return self.error / self.bound if self.error < INFINITE and self.bound > 0 else INFINITE
        return self.error / self.bound if self.bound else 0.0


def whole(_name: str, tensor: Tensor) -> Tensor:
    """Return the tensor itself: nothing is sharded."""
    return tensor


def compare_tensor(
    what: str, step: int, ours: Tensor, theirs: Tensor, bound: float, *, scale: float | None = None
) -> Difference:
    """Compare a tensor with one process's.

    Args:
        what: Its kind and name.
        step: 0-based.
        ours: What this rank holds.
        theirs: The same part of one process's.
        bound: The largest error that rounding explains.
        scale: Of one process's whole tensor, see `scale_of`; None if `theirs` is whole and
            its own norm is meant.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        note = f"{tuple(ours.shape)} {ours.dtype}, one process {tuple(theirs.shape)} {theirs.dtype}"
        return Difference(what, step, INFINITE, bound, note=note)
    if torch.equal(ours, theirs):
        return Difference(what, step, 0.0, bound)
    gap = widest(ours) - widest(theirs)
    scale = scale_of(theirs, 0.0) if scale is None else scale
    error = float(torch.linalg.vector_norm(gap)) / scale if scale else INFINITE
    note = "" if error <= bound else _largest_gap(gap, ours, theirs)
    return Difference(what, step, error, bound, note=note)


def compare_named(
    kind: str,
    step: int,
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    bound: float,
    shard: Shard = whole,
) -> Iterator[Difference]:
    """Compare what this rank holds with its part of one process's tensors, by plain names."""
    typical = root_mean_square(theirs.values())
    for name, tensor in ours.items():
        what = f"{kind} {name}"
        if name not in theirs:
            yield Difference(what, step, INFINITE, bound, note="unknown to one process")
            continue
        full = theirs[name]
        scale = scale_of(full, typical)
        yield compare_tensor(what, step, tensor, shard(name, full), bound, scale=scale)


def _largest_gap(gap: Tensor, ours: Tensor, theirs: Tensor) -> str:
    at = gap.abs().nan_to_num(nan=INFINITE).argmax()
    place = [int(i) for i in torch.unravel_index(at, gap.shape)]
    values = ours.flatten()[at].item(), theirs.flatten()[at].item()
    return f"largest at {place}: {values[0]:.9g}, one process {values[1]:.9g}"

"""Comparison of tensors that should be equal, and a bound on the error that rounding explains.

Rounding errors of both signs add up like a random walk, so the bound grows with the root of the
number of additions between inputs and result (N. J. Higham, T. Mary, A new approach to
probabilistic rounding error analysis, 2019).

In bfloat16 such a bound would let every fault pass. Instead, a layout may lose 1.25 times what one
process loses against one in float64; both, and the ranks, use the experts that the bfloat16 process
chose, see `expert_choices`. A single tensor's loss is random: all of a kind are compared together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..compose.digests import differing_sides, keyed_pieces
from ..compose.summation import ROOM, root_mean_square, scale_of, widest
from ..dist import get_rank
from ..parallel.expert_parallel.building import find_expert_cuts
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.pg_manager.building import digest
from ..parallel.tensor_parallel import take_own
from .expert_choices import Choice, sizes

LOW, FACTOR = "bfloat16", 1.25  # a dtype, and its allowed loss / one process's rounding loss
SCORES = 4.0  # times the median error of scores
LARGEST = 1e-3  # a larger bound would let bfloat16 pass for float32: it rounds by 1e-3 or more


def bound(dtype: torch.dtype, chain: int, step: int) -> float:
    """Return the largest relative error that rounding explains after `chain` additions a step."""
    return torch.finfo(dtype).eps * ROOM * math.sqrt(chain * (step + 1))


def blind(dtype: torch.dtype, chain: int, steps: int) -> str:
    """Return why a dtype's rounding would hide faults, or ''; bfloat16 has its own limit."""
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
Exact = Mapping[str, Any] | None  # a step of the float64 process; None unless judging bfloat16


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between one tensor of a layout and one process's.

    Attributes:
        what: 'loss', 'norm', 'gradient NAME', 'weight NAME' and the like.
        step: 0-based.
        error: 2-norm of the difference over the tensor's scale, see `scale_of`; infinite if there
            is nothing to compare.
        bound: The largest error that rounding explains.
        note: Both values at the largest difference, or the reason for a missing comparison.
        rank: Global rank that holds the tensor.
    """

    what: str
    step: int
    error: float
    bound: float
    note: str = ""
    rank: int = 0

    @property
    def failed(self) -> bool:
        """True if the error is beyond the bound; a NaN fails."""
        return not self.error <= self.bound

    @property
    def severity(self) -> float:
        """Error in units of the bound, for sorting; a NaN in either is worst."""
        if self.failed:
            return self.error / self.bound if self.error < INFINITE and self.bound > 0 else INFINITE
        return self.error / self.bound if self.bound else 0.0


def compare_tensor(
    what: str, step: int, ours: Tensor, theirs: Tensor, bound: float, *, scale: float | None = None
) -> Difference:
    """Compare this rank's shard with that of one process, relative to `scale`, see `scale_of`."""
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


def _largest_gap(gap: Tensor, ours: Tensor, theirs: Tensor) -> str:
    index = gap.abs().nan_to_num(nan=INFINITE).argmax()
    place = [int(i) for i in torch.unravel_index(index, gap.shape)]
    values = ours.flatten()[index].item(), theirs.flatten()[index].item()
    return f"largest at {place}: {values[0]:.9g}, one process {values[1]:.9g}"


def missing(
    kind: str, step: int, held: Iterable[str], theirs: Iterable[str], bound: float
) -> Iterator[Difference]:
    """Report tensors of one process that this layout lacks."""
    for name in sorted(set(theirs) - set(held)):
        yield Difference(f"{kind} {name}", step, INFINITE, bound, note="missing on this layout")


def doubled(
    stages: Iterable[Iterable[str]], tied: Iterable[str], bound: float
) -> Iterator[Difference]:
    """Report parameters that several stages hold though they are not tied: they count twice."""
    stages = list(stages)
    for name in sorted({name for names in stages for name in names} - set(tied)):
        owners = [stage for stage, names in enumerate(stages) if name in names]
        if len(owners) > 1:
            note = f"held by stages {owners}, and not tied: it counts {len(owners)} times"
            yield Difference(f"parameter {name}", 0, INFINITE, bound, note=note)


def unlike(
    kind: str,
    step: int,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    manager: ProcessGroupManager,
    bound: float,
) -> Iterator[Difference]:
    """Report tensors whose bits differ from those of another rank with the same shard."""
    held = {key: digest(piece) for _, key, piece in keyed_pieces(model, tensors, manager)}
    for key, sides in differing_sides([*held.items()], manager).items():
        if key in held:
            other = min(rank for side in sides if get_rank() not in side for rank in side)
            note = f"rank {other} holds other bits: they were never synchronised"
            yield Difference(f"{kind} {key.name}", step, INFINITE, bound, note=note)


def own_shard(model: nn.Module) -> Shard:
    """Return a function that takes this rank's shard of a whole tensor, by its plain name."""
    cuts = find_expert_cuts(model)

    def take(name: str, whole: Tensor) -> Tensor:
        cut = cuts.get(name)
        own = take_own(model, name, whole)  # experts may also be sharded over tp
        return own if cut is None else own[cut.own.start : cut.own.stop]

    return take


# In bfloat16, against float64


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


def compare_tensors(
    kind: str,
    step: int,
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Any],
    limit: float,
    exact: Exact = None,
    shard: Shard = lambda _, tensor: tensor,
) -> Iterator[Difference]:
    """Compare this rank's tensors with the same shards of one process's, by plain names.

    In bfloat16 (`exact` is not None), compare the total rounding losses of both. The last word of
    `kind`, such as "gradient" or "whole weight", names the tensors of a step.
    """
    plural = f"{kind.split()[-1]}s"
    theirs = theirs[plural]
    reference = theirs if exact is None else exact[plural]
    typical = root_mean_square(reference.values())
    ours_lost, theirs_lost = 0.0, 0.0
    for name, tensor in ours.items():
        if name not in theirs:
            note = "unknown to one process"
            yield Difference(f"{kind} {name}", step, INFINITE, limit, note=note)
            continue
        own, scale = shard(name, theirs[name]), scale_of(reference[name], typical)
        if exact is None or (own.shape, own.dtype) != (tensor.shape, tensor.dtype):
            yield compare_tensor(f"{kind} {name}", step, tensor, own, limit, scale=scale)
            continue
        true = widest(shard(name, reference[name]))
        ours_lost += _distance(tensor, true, scale) ** 2
        theirs_lost += _distance(own, true, scale) ** 2
    if exact is not None:
        note = "rounding loss of all tensors against float64; the bound is the largest allowed"
        bound = FACTOR * math.sqrt(theirs_lost)
        yield Difference(f"{kind}s", step, math.sqrt(ours_lost), bound, note=note)


def _distance(tensor: Tensor, true: Tensor, scale: float) -> float:
    return float(torch.linalg.vector_norm(widest(tensor) - true)) / scale if scale else 0.0


def score_error(choices: Sequence[Choice], exact: Sequence[Choice]) -> float:
    """Return the error of nearly all bfloat16 scores, relative to the largest of their row."""
    gaps = [
        (a.scores.double() - b.scores).abs().nan_to_num(nan=0.0).amax(1) / sizes(b.scores)
        for a, b in zip(choices, exact, strict=True)
    ]
    return SCORES * float(torch.cat(gaps).median()) if gaps else 0.0

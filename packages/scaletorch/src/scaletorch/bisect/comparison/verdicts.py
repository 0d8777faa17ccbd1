"""Verdicts: the error of each tensor of a run against a reference, and the bound on it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...compose.summation import ROOM, root_mean_square
from ..keys import FINAL, Key, Kind
from .places import Held, Piece, Sharding, assemble, in_terms, norm, pieces_of, shard_at, shardings
from .runs import Run, calling, reach

GOOD, BAD, UNSEEN = "good", "bad", "unseen"
MEASURED = 4.0  # a layout's rounding error may be this many times that of one process
NEAR = 1e-6  # shards with a smaller error are in the right places
INFINITE = math.inf
BEYOND = 1e30  # larger values are masks, not results


@dataclass(slots=True)
class Judged:
    """The verdict on one tensor.

    Attributes:
        key: Key of the tensor.
        state: GOOD, BAD or UNSEEN.
        error: The largest relative difference of a rank's shard, in the 2-norm.
        bound: The largest error that rounding explains.
        wrong: (rank, micro-batch) of the shards beyond the bound.
        why: The reason if it could not be compared, or is wrong without a comparison.
    """

    key: Key
    state: str
    error: float = 0.0
    bound: float = 0.0
    wrong: list[tuple[int, int]] = field(default_factory=list)
    why: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of two runs, assembled."""

    pieces: list[Piece]  # the shards of the run in question
    whole: Tensor  # the full tensor of the reference
    dims: tuple[Sharding, ...]  # the sharding of its dims
    errors: list[float]  # the error of each piece, see `Judged.error`

    @property
    def error(self) -> float:
        """The largest error; a NaN counts as infinite."""
        return max((INFINITE if math.isnan(e) else e for e in self.errors), default=0.0)


def measure(noise: Run, reference: Run) -> dict[Key, float]:
    """Return each tensor's rounding error in a lower dtype, in epsilons.

    It is infinite for integers that rounding changes, such as expert indices.
    """
    found, eps = {}, coarsest(noise)
    for key in noise.held if eps else ():
        met = meet(key, noise, reference)
        if met is not None and (met.error < INFINITE) == (eps_of(noise.held[key][0]) > 0):
            found[key] = met.error / eps
    return found


def judge_all(
    run: Run,
    reference: Run,
    sources: Mapping[Key, list[Key]],
    lost: Mapping[Key, float],
    chain: int,
) -> dict[Key, Judged]:
    """Compare all tensors that the reference has, up to the first step with a wrong result.

    Bounds follow from `lost`, the rounding errors of `measure`, else from the additions (`chain`).
    """
    found: dict[Key, Judged] = {}
    eps, rounds = max(coarsest(run), coarsest(reference)), rounding(run, reference, sources)
    # In a dtype below float64, rounding alone may choose other experts.
    chooses = eps > torch.finfo(torch.float64).eps and INFINITE in lost.values()
    for step in reference.steps:
        gradients = [k for k in reference.held if k[:2] == (step, Kind.GRADIENT)]
        typical = root_mean_square(h.tensor for k in gradients for h in reference.held[k])
        for key in reference.held:
            missing = key.kind == Kind.DATA and key not in run.held
            if key.step != step or key.kind == Kind.TERM or missing:
                continue
            limit = _bound(key, rounds[key], lost, eps, chain)
            found[key] = verdict = _judge(key, run, reference, limit, typical)
            if chooses and key.kind == Kind.FORWARD and verdict.wrong and not verdict.bound:
                why = "these are integers, and rounding alone chose others"
                found[key] = Judged(key, UNSEEN, why=why)
        for key, held in run.held.items():
            extra = key[:2] == (step, Kind.GRADIENT) and key not in reference.held
            if extra and any(bool(each.tensor.any()) for each in held):
                found[key] = Judged(key, BAD, INFINITE, why="the reference has no gradient of it")
        if any(each.state == BAD and key.kind in FINAL for key, each in found.items()):
            break  # later steps inherit its errors
    return found


def meet(key: Key, run: Run, reference: Run, typical: float = 0.0) -> Pair | None:
    """Assemble a tensor of two runs and compare them; None if the shards fit no full tensor.

    Differences are divided by elements of at least `typical`. Gradients of activations are weighed
    by `Description.weight`.
    """
    ours, theirs = run.held.get(key), reference.held.get(key)
    if not ours or not theirs:
        return None
    best: Pair | None = None
    weighed = key.kind == Kind.BACKWARD
    for dims in shardings([*theirs, *ours]):
        right = pieces_of(theirs, dims, weighed=weighed)
        whole = assemble(right, dims, sums=any(h.line.sums for h in theirs))
        pieces = pieces_of(ours, dims, weighed=weighed)
        if any(held.line.sums for held in ours) or (weighed and in_terms(ours, dims)):
            errors = [_error(assemble(pieces, dims, sums=True), whole, whole, typical)]
        else:
            errors = [_error(p.tensor, shard_at(whole, p), whole, typical) for p in pieces]
        met = Pair(pieces, whole, dims, errors)
        if best is None or met.error < best.error:
            best = met
        if met.error <= NEAR:
            break
    return best


def _judge(key: Key, run: Run, reference: Run, limit: float, typical: float) -> Judged:
    theirs, ours = reference.held[key], run.held.get(key, [])
    uncounted = run.uncounted.get(calling(key)) or reference.uncounted.get(calling(key))
    if uncounted and key.kind in (Kind.FORWARD, Kind.BACKWARD):
        return Judged(key, UNSEEN, why=uncounted)
    if not ours:
        state = BAD if key.kind in (Kind.START, Kind.GRADIENT) else UNSEEN
        return Judged(key, state, INFINITE if state == BAD else 0.0, why="no rank has it")
    met = meet(key, run, reference, typical if key.kind == Kind.GRADIENT else 0.0)
    if met is None:
        shards, whole = ({tuple(h.line.shape) for h in each} for each in (ours, theirs))
        return Judged(
            key, UNSEEN, why=f"shards of {sorted(shards)} fit no place in {sorted(whole)}"
        )
    if not any(eps_of(held) for held in [*ours, *theirs]):
        limit = 0.0  # integers
    wrong = [
        (piece.rank, piece.micro_batch)
        for piece, error in zip(met.pieces, met.errors, strict=False)
        if not error <= limit
    ]
    if key.kind == Kind.GRADIENT and (none := _without(key, run)):
        wrong += [(rank, 0) for rank in none]
        why = f"ranks {none} have the parameter and no gradient of it"
        return Judged(key, BAD, INFINITE, limit, wrong, why)
    sums = wrong and key.kind == Kind.BACKWARD and _is_of_all_rows(met, ours)
    if sums and adds_up(key, run, reference, limit):
        return Judged(key, GOOD, 0.0, limit)  # a tensor without rows: ranks hold gradient terms
    state = GOOD if met.error <= limit else BAD
    return Judged(key, state, met.error, limit, wrong)


def _without(key: Key, run: Run) -> list[int]:
    """Return the ranks that have a parameter's weight after the step, but no gradient of it."""
    have, trained = (
        {held.recording.rank for held in run.held.get(each, ())}
        for each in (key, key._replace(kind=Kind.WEIGHT))
    )
    return sorted(trained - have)


def _is_of_all_rows(met: Pair, ours: Sequence[Held]) -> bool:
    """Return whether a tensor has no dim of rows, although the batch's rows are divided."""
    axes = [held.recording.header["axes"].get("rows") for held in ours]
    divided = all(axis is not None and sum(b - a for a, b in axis[1][0]) < axis[0] for axis in axes)
    return divided and not any("rows" in each.name for each in met.dims)


def _bound(key: Key, eps: float, lost: Mapping[Key, float], coarse: float, chain: int) -> float:
    """Return the largest error that rounding by `eps` explains; `lost` is counted in `coarse`."""
    by_length = eps * ROOM * math.sqrt(chain * (key.step + 1))
    if key not in lost:
        return by_length
    return max(MEASURED * lost[key] * coarse, by_length if by_length < NEAR else coarse * ROOM)


def rounding(run: Run, reference: Run, sources: Mapping[Key, list[Key]]) -> dict[Key, float]:
    """Return, for each tensor, the largest epsilon among its dtypes and those of its ancestors."""
    own = {k: max(map(eps_of, (*held, *run.held.get(k, ())))) for k, held in reference.held.items()}
    users: dict[Key, list[Key]] = defaultdict(list)
    for key, parents in sources.items():
        for source in parents:
            users[source].append(key)
    found: dict[Key, float] = {}
    for eps in sorted(set(own.values())):  # coarser dtypes last, since they override finer ones
        begin = [key for key in own if own[key] == eps]
        found |= dict.fromkeys(reach(begin, lambda key: users.get(key, ())), eps)
    return found


def coarsest(run: Run) -> float:
    """Return the largest epsilon of a run's dtypes, the unit of its rounding errors."""
    return max((eps_of(held) for each in run.held.values() for held in each), default=0.0)


def eps_of(held: Held) -> float:
    """Return the epsilon of a tensor's dtype; 0 for integers."""
    dtype = getattr(torch, held.line.dtype)
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _error(ours: Tensor, theirs: Tensor, whole: Tensor, typical: float) -> float:
    """Return the 2-norm of the difference, over the shard's norm or its share of the whole's."""
    if ours.shape != theirs.shape:
        return INFINITE
    if not theirs.is_floating_point() and not ours.is_floating_point():
        return 0.0 if torch.equal(ours, theirs) else INFINITE
    # Clamped, so that masks of any dtype are equal.
    ours, theirs, whole = (x.double().clamp(-BEYOND, BEYOND) for x in (ours, theirs, whole))
    if torch.equal(ours, theirs):
        return 0.0
    share = math.sqrt(theirs.numel() / max(whole.numel(), 1))
    size = max(norm(theirs), share * norm(whole.nan_to_num()), typical * theirs.numel() ** 0.5)
    gap = norm(ours - theirs)
    return gap / size if size and not math.isnan(gap) else INFINITE


def adds_up(key: Key, run: Run, reference: Run, limit: float = NEAR) -> bool:
    """Return whether terms sum to the right tensor, over all ranks or for each tp rank."""
    ours, theirs = run.held[key], reference.held[key]
    dims = next(iter(shardings([*theirs, *ours])), None)
    if dims is None:
        return False
    whole = assemble(pieces_of(theirs, dims), dims, sums=True)
    total = assemble(pieces_of(ours, dims, weighed=True), dims, sums=True)
    if _error(total, whole, whole, 0.0) <= limit:
        return True
    by_tp_rank: dict[int, list[Held]] = {}
    for held in ours:
        groups, rank = held.recording.header["groups"].get("tp", []), held.recording.rank
        tp_rank = next((group.index(rank) for group in groups if rank in group), 0)
        by_tp_rank.setdefault(tp_rank, []).append(held)
    for terms in by_tp_rank.values():
        pieces = pieces_of(terms, dims, weighed=True)
        total = assemble(pieces, dims, sums=True)
        errors = (_error(shard_at(total, p), shard_at(whole, p), whole, 0.0) for p in pieces)
        if not all(error <= limit for error in errors):
            return False
    return True

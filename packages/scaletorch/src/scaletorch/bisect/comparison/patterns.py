"""Explanations of a wrong tensor: a wrong factor, a missing sum, or slices in wrong places."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from ...compose.naming import RUNS, ranges
from .places import Piece, norm, shard_at

ROOM = 2.0  # times the bound, for the rounding of a guess and of the right values
UNEXPLAINED = 0.3  # fraction of the difference that a guess may leave
HUGE = 1e140  # the square of a larger number overflows; it counts as infinite
CLEAR = 6.0  # times its bound: an element with a larger error is wrong for sure
CHANCE = math.log(1e-4)  # largest probability that a guess fits by accident
SENTENCES = 3
FINEST = 1e-14  # smallest bound: float64 itself rounds
CANDIDATES = 8  # largest number of factors to try
NEAR = 0.05  # relative distance within which an integer, or 1/k, is tried before the fit itself
EXACT = 1e-6  # relative distance within which a factor is called 1/k
LARGEST = 2**20  # largest number of pairs of slices to compare
WIDTH = 16  # size of the random projection of slices, to find the nearest one
SHOWN = 3  # ranges of a new order to name in a sentence
BATCHES = "micro-batches"


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's piece with its right values; everything is float64 and finite."""

    piece: Piece
    have: Tensor  # the rank's values; those of `want` if either is not finite
    want: Tensor  # the right values; 0 for those that are not finite
    odd: Tensor  # mask of elements that are not finite while the right ones are, or the reverse
    mask: Tensor  # mask of wrong elements, among the finite ones
    had: Tensor  # values of the wrong elements, 1-d
    due: Tensor  # right values of the wrong elements, 1-d


@dataclass(frozen=True, slots=True)
class Case:
    """A wrong tensor, with all data that guesses need."""

    shards: Sequence[Shard]  # the pieces of all ranks
    wrong: Sequence[Shard]  # the pieces that differ by more than rounding explains
    whole: Tensor  # the right tensor, float64, finite
    bound: float  # relative bound on the 2-norm of a difference
    scale: float  # the 2-norm that differences are divided by
    axes: Sequence[str]  # names of the dims of `whole`, in the plural; "" for a dim without a name
    groups: Mapping[str, Sequence[tuple[int, ...]]]  # for each axis of the grid its groups of ranks

    def allowed(self, elements: int, *norms: float) -> float:
        """Return the largest 2-norm of the error of `elements` elements with values of `norms`."""
        share = self.scale * math.sqrt(elements / max(self.whole.numel(), 1))
        return self.bound * max([share, *norms])

    def agrees(
        self, have: Tensor, guess: Tensor, want: Tensor, fitted: int = 0, choices: float = 0.0
    ) -> bool:
        """Return whether a guess explains the values, and not by accident.

        `fitted` is the number of parameters of the guess that were fitted to the values;
        `choices` is the logarithm of the number of possible guesses of this kind.
        """
        one = math.log(min(max(4 * self.bound, 1e-8), 0.9))  # chance that one number fits
        if (have.numel() - fitted) * one + choices > CHANCE:
            return False
        room = ROOM * self.allowed(have.numel(), norm(want), norm(guess))
        return norm(have - guess) <= min(room, UNEXPLAINED * norm(have - want))

    def shard_of(self, piece: Piece, right: Tensor) -> Shard:
        """Return a piece with its values in `right`, which may have NaN and infinity."""
        raw, want = plain(piece.tensor), shard_at(right, piece)
        finite = raw.isfinite() & want.isfinite()
        odd = ~finite & (raw != want) & ~(raw.isnan() & want.isnan())
        want = want.nan_to_num(0.0, 0.0, 0.0)
        have = torch.where(finite, raw, want)
        mask = self._wrong(have - want, want)
        return Shard(piece, have, want, odd, mask, have[mask], want[mask])

    def _wrong(self, gap: Tensor, want: Tensor) -> Tensor:
        """Return the mask of wrong elements; all others together are within their bound."""
        allowed = self.allowed(gap.numel(), norm(want))
        if norm(gap) <= allowed:
            return torch.zeros_like(gap, dtype=torch.bool)
        size = want.abs().clamp(min=self.allowed(1) / self.bound)
        wrong = gap.abs() > CLEAR * self.bound * size
        return wrong if norm(gap[~wrong]) <= allowed else gap != 0  # many are slightly wrong

    def plural(self, dim: int) -> str:
        """Return the name of a dim's slices, such as 'rows'."""
        name = self.axes[dim] if dim < len(self.axes) else ""
        return name or f"slices of dim {dim}"

    def ranks_of(self, shards: Sequence[Shard]) -> str:
        """Return the ranks of shards as words, with the micro-batches unless all are meant."""
        held, chosen = (
            {(each.piece.rank, each.piece.micro_batch) for each in several}
            for several in (self.shards, shards)
        )
        ranks, every = {rank for rank, _ in chosen}, {rank for rank, _ in held}
        text = "every rank" if ranks == every and len(every) > 1 else numbered("rank", ranks)
        if chosen == {(rank, batch) for rank, batch in held if rank in ranks}:
            return text
        return f"{text} ({numbered('micro-batch', {batch for _, batch in chosen})})"

    def where(self, shards: Sequence[Shard], masks: Sequence[Tensor] = ()) -> str:
        """Return text such as ' at positions 8-11 of rows 0-15'; '' if all elements are meant."""
        boxes = [box_of(mask) for mask in masks or [shard.mask for shard in shards]]
        named = sum(math.prod(map(len, box)) for box in boxes)
        whole = named == sum(shard.have.numel() for shard in shards)
        texts = []
        for dim in reversed(range(self.whole.ndim)):
            pairs = zip(shards, boxes, strict=True)
            place = torch.cat([shard.piece.index[dim][box[dim]] for shard, box in pairs]).unique()
            if len(place) < self.whole.shape[dim] and (len(shards) == 1 or not whole):
                name, separator, tail = self.plural(dim).partition(" of ")
                texts.append(f"{numbered(name.removesuffix('s'), place.tolist())}{separator}{tail}")
        return f" at {' of '.join(texts)}" if texts else ""


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor in float64 on the CPU; elements whose square overflows become infinite."""
    tensor = tensor.detach().cpu().double()
    return torch.where(tensor.abs() > HUGE, tensor.sign() * math.inf, tensor)


def pick(tensor: Tensor, index: Sequence[Tensor]) -> Tensor:
    """Return the elements of a tensor at the given indices of each dim."""
    for dim, indices in enumerate(index):
        tensor = tensor.index_select(dim, indices)
    return tensor


def slices(tensor: Tensor, dim: int) -> Tensor:
    """Return the slices along a dim, flattened: [size of the dim, elements of a slice]."""
    return tensor.movedim(dim, 0).unsqueeze(-1).flatten(1)


def box_of(mask: Tensor) -> tuple[Tensor, ...]:
    """Return, for each dim, the indices whose slice has a True element of a mask."""
    return tuple(index.unique() for index in mask.nonzero().unbind(1))


def numbered(name: str, numbers: Iterable[int]) -> str:
    """Return a name with numbers, such as 'rank 0', 'ranks 0 and 1' or 'micro-batches 0-3'."""
    numbers = set(numbers)
    ending = "es" if name.endswith("ch") else "s"
    return f"{name}{ending if len(numbers) > 1 else ''} {ranges(numbers)}"


def has(subject: str) -> str:
    """Return a subject followed by 'has' or 'have'."""
    return f"{subject} {'has' if subject.startswith(('every rank', 'rank ')) else 'have'}"


# A guess that holds: the indices in `Case.wrong` of the pieces that it explains, and its sentence.
Finding = tuple[frozenset[int], str]


def explain(
    pieces: Sequence[Piece],
    whole: Tensor,
    bound: float,
    *,
    axes: Sequence[str] = (),
    groups: Mapping[str, Sequence[tuple[int, ...]]] | None = None,
    scale: float | None = None,
) -> list[str]:
    """Return sentences that describe the error of a wrong tensor.

    At most three, surest first, without a full stop; none if nothing differs. `axes` names the
    slices of each dim in the plural, '' for none; `scale` is by default the norm of `whole`.
    """
    right = plain(whole)
    finite = right.nan_to_num(0.0, 0.0, 0.0)
    bound = min(max(bound, FINEST), 1.0) if bound > 0 else FINEST
    scale = scale if scale is not None and 0 < scale < HUGE else norm(finite)
    case = Case((), (), finite, bound, scale, axes, groups or {})
    # If only the sum of the pieces exceeds the bound, look for pieces beyond half of it.
    for tried in (case, replace(case, bound=bound / 2)):
        shards = [tried.shard_of(piece, right) for piece in pieces]
        if any(bool(shard.mask.any() or shard.odd.any()) for shard in shards):
            break
    case = replace(case, shards=shards, wrong=[s for s in shards if bool(s.mask.any())])
    sentences = []
    if odd := [shard for shard in shards if bool(shard.odd.any())]:
        place = case.where(odd, [shard.odd for shard in odd])
        sentences.append(f"{has(case.ranks_of(odd))} NaN or infinity{place}, unlike the reference")
    return [*sentences, *_guessed(case)][:SENTENCES]


def _guessed(case: Case) -> Iterator[str]:
    """Yield guesses, each covering most of the remaining pieces; last, the unexplained pieces."""
    left = set(range(len(case.wrong)))
    found = [finding for guess in GUESSES if left for finding in guess(case)]
    while left:
        covers, sentence = max(found, key=lambda pair: len(pair[0] & left), default=(left, ""))
        if not sentence or not covers & left:
            shards = [case.wrong[i] for i in sorted(left)]
            had, due = (torch.cat([getattr(s, n) for s in shards]) for n in ("had", "due"))
            by = f", by {norm(had - due) / norm(due):.4g} of their size" if norm(due) else ""
            yield f"{has(case.ranks_of(shards))} values that differ{case.where(shards)}{by}"
            return
        yield sentence
        left -= covers


def _passing(case: Case, what: str, test: Callable[[Shard], bool]) -> Iterator[Finding]:
    """Yield one finding for the wrong shards that pass a test, if there are any."""
    covers = [i for i, shard in enumerate(case.wrong) if test(shard)]
    if covers:
        shards = [case.wrong[i] for i in covers]
        text = f"{has(case.ranks_of(shards))} {what}{case.where(shards)}"
        yield frozenset(covers), text


def zeros(case: Case) -> Iterator[Finding]:
    """Find pieces that are all zeros."""
    yield from _passing(case, "all zeros", lambda shard: not bool(shard.had.any()))


def scaled(case: Case) -> Iterator[Finding]:
    """Find factors, each for all elements of a piece; integers and inverses are tried first."""
    fits = [_factor(shard) for shard in case.wrong]
    simple = [factor for fit in fits for factor in _simple_factors(fit)]
    for factor in list(dict.fromkeys([*simple, *fits]))[:CANDIDATES]:

        def fits_all(shard: Shard, factor: float = factor) -> bool:
            return case.agrees(shard.had, factor * shard.due, shard.due, fitted=1)

        if factor:
            yield from _passing(case, _times(factor, case.bound), fits_all)


def _factor(shard: Shard) -> float:
    square = float((shard.due * shard.due).sum())
    return float((shard.had * shard.due).sum()) / square if square else 0.0


def _simple_factors(fit: float) -> list[float]:
    """Return the nearest integer and the nearest inverse of one, if they are within `NEAR`."""
    inverse = round(1 / fit) if fit else 0
    found = [float(round(fit)), 1 / inverse if inverse else 0.0]
    return [f for f in found if f not in (0.0, 1.0) and abs(f - fit) < NEAR * abs(f)]


def _times(factor: float, bound: float) -> str:
    size = abs(factor)
    if factor == -1:
        return "the right values with the sign flipped"
    for k in range(2, 65):
        if abs(size * k - 1) < EXACT:
            return f"{'-' if factor < 0 else ''}1/{k} of the right values"
    digits = min(max(1 - math.ceil(math.log10(bound)), 2), 4)
    while float(f"{size:.{digits}g}") == 1 and digits < 12:
        digits += 1  # 1.000001 is not 1
    return f"{factor:.{digits}g} times the right values"


def moved(case: Case) -> Iterator[Finding]:
    """Find slices that are in the wrong places."""
    for dim in range(case.whole.ndim):
        found: dict[str, list[int]] = {}
        for i, shard in enumerate(case.wrong):
            if (pairs := _sources(case, shard, dim)) is not None:
                place, source = pairs.tolist()
                what = "in another order" if sorted(place) == sorted(source) else "from elsewhere"
                moves = _moves(list(zip(place, source, strict=True)))
                found.setdefault(f"{case.plural(dim)} {what}: {moves}", []).append(i)
        for words, covers in found.items():
            ranks = case.ranks_of([case.wrong[i] for i in covers])
            yield frozenset(covers), f"{has(ranks)} {words}"


def _sources(case: Case, shard: Shard, dim: int) -> Tensor | None:
    """Return the indices of wrong slices and their right indices, [2, n], or None.

    Up to a third of the wrong slices may belong nowhere, e.g. after a shift over an edge.
    """
    box = box_of(shard.mask)
    place, size = shard.piece.index[dim][box[dim]], case.whole.shape[dim]
    if len(place) * size > LARGEST:
        return None
    index = [whole[local] for whole, local in zip(shard.piece.index, box, strict=True)]
    index[dim] = torch.arange(size)
    have, want = (slices(pick(tensor, box), dim) for tensor in (shard.have, shard.want))
    pool = slices(pick(case.whole, index), dim)
    nearest = _nearest(have, pool, place)
    guess = pool[nearest]
    fits = (have - guess).norm(dim=1) <= UNEXPLAINED * (have - want).norm(dim=1)
    enough, choices = 3 * int(fits.sum()) >= 2 * len(place), len(place) * math.log(size)
    if enough and case.agrees(have[fits], guess[fits], want[fits], choices=choices):
        return torch.stack((place, nearest))[:, fits]
    return None


def _nearest(have: Tensor, pool: Tensor, place: Tensor) -> Tensor:
    """Return, for each slice of [n, elements], the nearest slice of a pool, except at its place."""
    if have.shape[1] > WIDTH:
        generator = torch.Generator().manual_seed(0)
        sketch = torch.randn(have.shape[1], WIDTH, generator=generator, dtype=have.dtype)
        have, pool = have @ sketch, pool @ sketch
    mode = "donot_use_mm_for_euclid_dist"  # matmul would lose digits by cancellation
    distance = torch.cdist(have, pool, compute_mode=mode)
    distance[torch.arange(len(place)), place] = torch.inf  # known to be wrong at its own place
    return distance.argmin(1)


def _moves(pairs: list[tuple[int, int]]) -> str:
    """Return text such as 'at 0-3 is what 4-7 should have, at 4-7 what 0-3 should have'."""
    texts: list[str] = []
    for _, run in groupby(pairs, key=lambda pair: pair[0] - pair[1]):
        places, sources = zip(*run, strict=True)
        verb = "" if texts else " is"
        texts.append(f"at {ranges(places)}{verb} what {ranges(sources)} should have")
    return ", ".join(texts[:SHOWN]) + (" ..." if len(texts) > SHOWN else "")


def sums(case: Case) -> Iterator[Finding]:
    """Find pieces of ranks, or of micro-batches, whose sum or mean is the right piece."""
    for over, clusters in _clusters(case):
        found: dict[str, list[list[int]]] = {}
        for cluster in clusters:
            shards = [case.wrong[i] for i in cluster]
            total = torch.stack([shard.have for shard in shards]).sum(0)
            guesses = {"partial sums: a sum": total, "terms of a mean: a mean": total / len(shards)}
            for words, guess in guesses.items():
                if all(case.agrees(guess, shard.want, shard.have) for shard in shards):
                    found.setdefault(words, []).append(cluster)
                    break
        for words, right in found.items():
            covers = frozenset(i for cluster in right for i in cluster)
            yield covers, f"{_owners(case, right, over)} {words} over {over} is missing"


def _clusters(case: Case) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield, for each axis, the lists of wrong pieces that a sum over it would add."""
    axes = {n: [set(g) for g in gs] for n, gs in case.groups.items() if any(len(g) > 1 for g in gs)}
    everyone = {shard.piece.rank for shard in case.shards}
    if [everyone] not in axes.values():
        axes["all ranks"] = [everyone]
    for name, groups in (axes | {BATCHES: [{rank} for rank in everyone]}).items():
        found: dict[object, list[int]] = {}
        for i, piece in enumerate(shard.piece for shard in case.wrong):
            group = next((n for n, ranks in enumerate(groups) if piece.rank in ranks), None)
            if group is not None:
                place = tuple(tuple(index.tolist()) for index in piece.index)
                batch = None if name == BATCHES else piece.micro_batch
                found.setdefault((place, batch, group), []).append(i)
        yield name, [cluster for cluster in found.values() if len(cluster) > 1]


def _owners(case: Case, clusters: Sequence[Sequence[int]], over: str) -> str:
    """Return text such as 'ranks 0 and 1 (tp) have', or the ranks of several groups."""
    ranks = [[case.wrong[i].piece.rank for i in cluster] for cluster in clusters]
    if over == BATCHES:
        ranks = [[rank for group in ranks for rank in group]]
    groups = list(dict.fromkeys(numbered("rank", group) for group in ranks))
    more = "; and so on" if len(groups) > RUNS else ""
    return has(f"{'; '.join(groups[:RUNS])}{more} ({over})")


# If two guesses explain the same number of pieces, the first of this list is chosen: it is less
# likely by chance, or more specific. A mean in place of a sum is 1/n of the right values, and n of
# them add up to these. Pieces that add up may be 0 if another rank's are not (sharded embedding).
GUESSES: Sequence[Callable[[Case], Iterator[Finding]]] = (scaled, sums, zeros, moved)

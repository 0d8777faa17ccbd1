"""Where the tokens of a call go and come from: counted, told to the other ranks, and read once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....dist import get_rank
from ....dist.building import agree, all_to_all_flat
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from .shares import ranges_of
from .travel import landed

_HIDDEN, _WEIGHTS = 1, 2  # bits that a rank tells the others: which gradients it needs
_FIELDS = 5  # numbers that a rank tells each other one: call, bits, rows, pairs, indices outside


@dataclass(frozen=True, slots=True)
class Route:
    """Which rows travel in one exchange, the same way back and in backward.

    A row is a token on its way to one rank, whichever and however many of its experts are there.

    Attributes:
        group: The ranks; None is this one alone.
        tokens: T, the tokens of this rank.
        rows: Indices int64 [S], the token of each row that leaves, those for the first rank first.
        sends: Rows for each rank; their sum is S.
        most: Rows of a token, at most: the smaller of K and the number of ranks.
        receives: Rows from each rank; their sum is R, the rows that come.
        pairs: Pairs of a row that comes and one of its experts here: R at least.
        backward: Whether a rank of the group needs gradients of hidden states or weights.
    """

    group: ProcessGroup | None
    tokens: int
    rows: Tensor
    most: int
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    pairs: int
    backward: bool


def find_route(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    counts: tuple[int, ...],
    group: ProcessGroup | None,
) -> Route:
    """Count this rank's rows, tell the others and read what they tell: one small all-to-all.

    Args:
        hidden: [T, H].
        index: Integers [T, K].
        weights: [T, K].
        counts: Experts of each rank.
        group: The ranks.

    Raises:
        InvalidArgumentError: An index is outside of the experts, or shapes do not fit.
        MismatchError: Ranks differ in sizes, dtypes or experts, or another has such an index.
    """
    _check_shapes(hidden, index, weights)
    call = _Call(hidden.shape[1], hidden.dtype, weights.shape[1], weights.dtype, counts,
                 torch.is_grad_enabled())  # fmt: skip
    ranks, experts = len(counts), sum(counts)
    owners = _owners(counts, index.device).take((index.long() + 1).clamp_(0, experts + 1))
    slots = owners.new_zeros((ranks + 1, len(index)))  # the last row is of indices outside
    slots.scatter_add_(0, owners.t(), _one(index.device).expand_as(owners.t()))
    goes, sums = slots[:ranks] > 0, slots.sum(1, keepdim=True)
    head = _head(_digest(call), _needs(hidden, weights), ranks, index.device)
    told = torch.cat(
        (head, goes.sum(1, keepdim=True), sums[:ranks], sums[ranks:].expand(ranks, 1)), 1
    )
    sizes = [_FIELDS] * ranks
    (heard,) = landed([all_to_all_flat(told.view(-1), sizes, sizes, group)])
    mine, theirs = torch.stack((told, heard.view_as(told))).tolist()  # once, the host reads
    needed = _read(call, mine[0][0], theirs, index, experts, group)
    sends, receives = (tuple(row[2] for row in each) for each in (mine, theirs))
    rows = torch.nonzero_static(goes, size=sum(sends))[:, 1].contiguous()
    pairs, most = sum(row[3] for row in theirs), min(index.shape[1], ranks)
    return Route(group, len(hidden), rows, most, sends, receives, pairs, bool(needed))


def stay(index: Tensor) -> Route:
    """Return the route of rows whose experts are all here."""
    nowhere = index.new_empty(0)
    return Route(None, len(index), nowhere, 1, (), (), index.numel(), backward=False)


def number_apart(index: Tensor, counts: tuple[int, ...], beyond: int, rank: int) -> Tensor:
    """Return indices counted so that every rank has experts of its own without weights.

    Args:
        index: Integers [T, K]; those with weights come first.
        counts: Experts with weights of each rank.
        beyond: How many have none. A token goes nowhere for them.
        rank: This one.
    """
    if not beyond:
        return index
    inside = index.long().add(1).clamp(0, sum(counts) + beyond + 1)
    return _numbers_apart(counts, beyond, rank, index.device).take(inside)


@lru_cache(maxsize=64)
def _numbers_apart(counts: tuple[int, ...], beyond: int, rank: int, device: torch.device) -> Tensor:
    """Return for each index + 1 the number; the first and last are outside."""
    ranges = ranges_of([count + beyond for count in counts])
    weighted = [each.start + at for each, n in zip(ranges, counts, strict=True) for at in range(n)]
    own = ranges[rank][counts[rank] :]
    return torch.tensor([-1, *weighted, *own, ranges[-1].stop], device=device)


@lru_cache(maxsize=64)
def _owners(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return for each index + 1 the rank that has the expert; the first and last are outside."""
    ranks = [rank for rank, count in enumerate(counts) for _ in range(count)]
    return torch.tensor([len(counts), *ranks, len(counts)], device=device)


@lru_cache(maxsize=64)
def _one(device: torch.device) -> Tensor:
    return torch.tensor(1, device=device)


@lru_cache(maxsize=64)
def _head(call: int, needs: int, ranks: int, device: torch.device) -> Tensor:
    """Return what a rank tells every other one of its call, int64 [ranks, 2]."""
    return torch.tensor([[call, needs]] * ranks, device=device)


def _check_shapes(hidden: Tensor, index: Tensor, weights: Tensor) -> None:
    fits = hidden.dim() == 2 and index.dim() == 2 and weights.shape == index.shape
    if not fits or len(index) != len(hidden) or index.is_floating_point():
        raise InvalidArgumentError(
            f"{describe_rank()}: experts take hidden states [T, H], integer indices [T, K] and "
            f"weights [T, K], got {tuple(hidden.shape)}, {index.dtype} {tuple(index.shape)} and "
            f"{tuple(weights.shape)}; a block that calls its experts otherwise needs an adapter"
        )


class _Call(NamedTuple):
    """What must be the same on all ranks."""

    hidden: int
    dtype: torch.dtype
    top_k: int
    of_weights: torch.dtype
    counts: tuple[int, ...]
    gradients: bool

    def lines(self) -> tuple[str, ...]:
        """Return it as text."""
        return (
            f"hidden size {self.hidden}, {self.dtype}",
            f"top-k {self.top_k}, {self.of_weights}",
            f"experts on the ranks {self.counts}",
            f"gradients {'on' if self.gradients else 'off'}",
        )


@lru_cache(maxsize=64)
def _digest(call: _Call) -> int:
    return digest_of(*call.lines())


@lru_cache(maxsize=64)
def digest_of(*lines: str) -> int:
    """Return a number that stands for lines of text."""
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _needs(hidden: Tensor, weights: Tensor) -> int:
    if not torch.is_grad_enabled():
        return 0
    return _HIDDEN * hidden.requires_grad | _WEIGHTS * weights.requires_grad


def _read(
    call: _Call,
    mine: int,
    theirs: Sequence[Sequence[int]],
    index: Tensor,
    experts: int,
    group: ProcessGroup | None,
) -> int:
    """Return what any rank needs, or raise on every rank what is wrong with one of them."""
    needed, outside = 0, 0
    for told, needs, *_, beyond in theirs:
        needed |= needs
        outside += beyond
        if told != mine:
            agree("a call of experts", call.lines(), group)
    if outside:
        wrong = index[(index < 0) | (index >= experts)].unique().tolist()
        error = InvalidArgumentError(
            f"{describe_rank()}: rank {get_rank(group)} of the group routes tokens to experts "
            f"{wrong[:8]}, but they are numbered from 0 to {experts - 1}"
        )
        agree("a call of experts", (), group, error=error if wrong else None)
    return needed

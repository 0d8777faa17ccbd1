"""Where the tokens of a call go and come from: counted, told to the other ranks, and read once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...dist import get_rank
from ...dist.building import agree, all_to_all_flat
from ...dist.errors import InvalidArgumentError
from ..pg_manager import describe_rank
from .shares import owners
from .travel import landed

_HIDDEN, _WEIGHTS, _OUTSIDE = 1, 2, 4  # bits that a rank tells the others
_FIELDS = 4  # numbers that a rank tells each other one: rows, pairs, call, bits


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
    experts = sum(counts)
    inside = index.clamp(0, experts - 1)
    slots = index.new_zeros((len(index), len(counts)), dtype=torch.int64)
    slots.scatter_add_(1, owners(counts, index.device)[inside], torch.ones_like(inside))
    goes = slots > 0
    lines = _call(hidden, weights, counts)
    bits = (inside != index).any() * _OUTSIDE + _needs(hidden, weights)
    told = slots.new_empty((len(counts), _FIELDS))
    told[:, 0], told[:, 1], told[:, 2], told[:, 3] = goes.sum(0), slots.sum(0), _digest(lines), bits
    sizes = [_FIELDS] * len(counts)
    (came,) = landed([all_to_all_flat(told.view(-1), sizes, sizes, group)])
    heard = came.view_as(told)
    mine, theirs = torch.stack((told, heard)).tolist()  # the one time that the host reads
    told_bits = _read(lines, mine[0], theirs, index, experts, group)
    sends = tuple(row[0] for row in mine)
    rows = torch.nonzero_static(goes.t(), size=sum(sends))[:, 1]
    receives, pairs = tuple(row[0] for row in theirs), sum(row[1] for row in theirs)
    backward = bool(told_bits & (_HIDDEN | _WEIGHTS))
    most = min(index.shape[1], len(counts))
    return Route(group, len(hidden), rows, most, sends, receives, pairs, backward)


def _check_shapes(hidden: Tensor, index: Tensor, weights: Tensor) -> None:
    fits = hidden.dim() == 2 and index.dim() == 2 and weights.shape == index.shape
    if not fits or len(index) != len(hidden) or index.is_floating_point():
        raise InvalidArgumentError(
            f"{describe_rank()}: experts take hidden states [T, H], integer indices [T, K] and "
            f"weights [T, K], got {tuple(hidden.shape)}, {index.dtype} {tuple(index.shape)} and "
            f"{tuple(weights.shape)}; a block that calls its experts otherwise needs an adapter"
        )


def _call(hidden: Tensor, weights: Tensor, counts: tuple[int, ...]) -> tuple[str, ...]:
    return (
        f"hidden size {hidden.shape[1]}, {hidden.dtype}",
        f"top-k {weights.shape[1]}, {weights.dtype}",
        f"experts on the ranks {counts}",
        f"gradients {'on' if torch.is_grad_enabled() else 'off'}",
    )


@lru_cache(maxsize=64)
def _digest(lines: tuple[str, ...]) -> int:
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _needs(hidden: Tensor, weights: Tensor) -> int:
    if not torch.is_grad_enabled():
        return 0
    return _HIDDEN * hidden.requires_grad | _WEIGHTS * weights.requires_grad


def _read(
    lines: tuple[str, ...],
    mine: Sequence[int],
    theirs: Sequence[Sequence[int]],
    index: Tensor,
    experts: int,
    group: ProcessGroup | None,
) -> int:
    """Return the bits of all ranks, or raise on every rank what one of them told."""
    bits = 0
    for *_, call, each in theirs:
        bits |= each
        if call != mine[2]:
            agree("a call of experts", lines, group)
    if bits & _OUTSIDE:
        error = None
        if mine[3] & _OUTSIDE:
            wrong = index[(index < 0) | (index >= experts)].unique().tolist()
            error = InvalidArgumentError(
                f"{describe_rank()}: rank {get_rank(group)} of the group routes tokens to experts "
                f"{wrong[:8]}, but they are numbered from 0 to {experts - 1}"
            )
        agree("a call of experts", (), group, error=error)
    return bits

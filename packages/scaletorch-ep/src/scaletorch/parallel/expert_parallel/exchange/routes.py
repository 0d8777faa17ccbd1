"""The experts of each rank, in contiguous ranges of any lengths, and the routes of tokens to them.

Rows are counted, counts exchanged with the other ranks, and read once by the host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....dist import get_rank
from ....dist.building import agree, all_to_all_flat
from ....dist.errors import InvalidArgumentError
from ...pg_manager import axis_group, describe_rank, get_process_group_manager
from ...placement import shard_sizes

# Numbers in the message to each other rank: call, needs, rows, indices out of range, pairs.
_FIELDS = 5


def token_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the ranks that hold the same tokens and split them, or None if there are none.

    The default is the manager's tp axis if the expert view folds it (etp = 1).
    """
    manager = get_process_group_manager()
    if group is not None:
        return axis_group("tp", group)
    if manager is None or manager.tp_size == 1 or manager.etp_size > 1:
        return None
    return manager.tp_group


def counts_of(experts: int | Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the number of experts of each rank, from their number or the number on each rank."""
    counts = shard_sizes(experts, ranks) if isinstance(experts, int) else tuple(experts)
    if len(counts) != ranks or min(counts) < 1:
        raise InvalidArgumentError(
            f"{describe_rank()}: each of {ranks} ranks needs at least one expert, got "
            f"{experts} ({', '.join(map(str, counts))} on the ranks): use at most as many ranks "
            "as experts"
        )
    return counts


def ranges_of(counts: Sequence[int]) -> tuple[range, ...]:
    """Return the experts of each rank, from their numbers."""
    return tuple(range(*ends) for ends in pairwise(accumulate(counts, initial=0)))


@dataclass(frozen=True, slots=True)
class Route:
    """The rows of one dispatch, and of its `combine` and backward.

    A row is a token sent to one rank, once for all of its experts on that rank.
    """

    group: ProcessGroup | None  # the ranks; None is one process
    tokens: int  # T, the tokens of this rank
    rows: Tensor  # int64 [S], the token of each row sent, those for the first rank first
    most: int  # maximum rows of a token: the smaller of K and the number of ranks
    sends: tuple[int, ...]  # rows for each rank; their sum is S
    receives: tuple[int, ...]  # rows from each rank; their sum is R, the rows received
    pairs: int  # of a received row and one of its local experts: R at least
    backward: bool  # whether a rank of the group needs gradients of hidden states or weights


def find_route(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    counts: tuple[int, ...],
    group: ProcessGroup | None,
) -> Route:
    """Count this rank's rows and exchange the counts by one small all-to-all.

    Takes hidden states [T, H], integers [T, K], weights [T, K] and the number of experts of each
    rank. The host reads once, for this exchange, its way back and backward.
    """
    call = _Call(hidden.shape[1], hidden.dtype, weights.shape[1], weights.dtype, counts,
                 torch.is_grad_enabled())  # fmt: skip
    ranks, experts = len(counts), sum(counts)
    owners = _owners(counts, index.device).take(index.long().clamp(-1, experts)).t()
    is_sent = owners.new_zeros((ranks + 1, len(index))).scatter_(0, owners, 1)[:ranks]
    pairs = owners.new_zeros(ranks + 1)
    pairs.scatter_add_(0, owners.reshape(-1), _one(index.device).expand(index.numel()))
    rows, out_of_range = is_sent.sum(1), pairs[-1:].expand(ranks)
    head = _fixed_fields(_digest(call), _needs_gradients(hidden, weights), ranks, index.device)
    fields = torch.cat((head, torch.stack((rows, out_of_range, pairs[:-1])))).t().reshape(-1)
    received = all_to_all_flat(fields, [_FIELDS] * ranks, [_FIELDS] * ranks, group).wait()
    numbers = torch.cat((rows, received)).tolist()  # the only read of the host
    sends, numbers = tuple(numbers[:ranks]), numbers[ranks:]
    calls, needs, receives, wrong, received_pairs = (numbers[i::_FIELDS] for i in range(_FIELDS))
    if len({*calls}) > 1:
        agree("a call of experts", call.lines(), group)
    if any(wrong):
        _refuse(index, experts, group)
    # `nonzero` is faster, but makes the host wait for a device once more.
    sent = is_sent.nonzero() if is_sent.is_cpu else torch.nonzero_static(is_sent, size=sum(sends))
    tokens, most = sent[:, 1].contiguous(), min(index.shape[1], ranks)
    total = sum(received_pairs)
    return Route(group, len(index), tokens, most, sends, tuple(receives), total, any(needs))


@lru_cache(maxsize=64)
def _owners(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return for each index the rank that has the expert; the last two entries are out of range."""
    ranks = [rank for rank, count in enumerate(counts) for _ in range(count)]
    return torch.tensor([*ranks, len(counts), len(counts)], device=device)


@lru_cache(maxsize=64)
def numbers_of(counts: tuple[int, ...], rank: int, device: torch.device) -> Tensor:
    """Return for each index the local number of the expert, or the local count if it is remote."""
    local = ranges_of(counts)[rank]
    numbers = [i - local.start if i in local else len(local) for i in range(sum(counts))]
    return torch.tensor(numbers, device=device)


@lru_cache(maxsize=64)
def _one(device: torch.device) -> Tensor:
    return torch.tensor(1, device=device)


@lru_cache(maxsize=64)
def _fixed_fields(call: int, needs: bool, ranks: int, device: torch.device) -> Tensor:
    """Return the fields of the message that are the same for every rank, int64 [2, ranks]."""
    return torch.tensor([[call] * ranks, [needs] * ranks], device=device)


def check_shapes(hidden: Tensor, index: Tensor, weights: Tensor) -> None:
    """Refuse arguments of experts of other shapes, or indices that are no integers."""
    fits = hidden.dim() == 2 and index.dim() == 2 and weights.shape == index.shape
    if not fits or index.shape[0] != hidden.shape[0] or index.is_floating_point():
        raise InvalidArgumentError(
            f"{describe_rank()}: experts take hidden states [T, H], integer indices [T, K] and "
            f"weights [T, K], got {tuple(hidden.shape)}, {index.dtype} {tuple(index.shape)} and "
            f"{tuple(weights.shape)}; a block that calls its experts otherwise needs an adapter"
        )


class _Call(NamedTuple):
    """The properties of a call that must be the same on all ranks."""

    hidden: int
    dtype: torch.dtype
    top_k: int
    weights_dtype: torch.dtype
    counts: tuple[int, ...]
    gradients: bool

    def lines(self) -> tuple[str, ...]:
        """Describe the call, for a comparison."""
        return (
            f"hidden size {self.hidden}, {self.dtype}",
            f"top-k {self.top_k}, {self.weights_dtype}",
            f"experts on the ranks {self.counts}",
            f"gradients {'on' if self.gradients else 'off'}",
        )


@lru_cache(maxsize=64)
def _digest(call: _Call) -> int:
    """Return a hash of a call."""
    digest = hashlib.blake2b("\n".join(call.lines()).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _needs_gradients(hidden: Tensor, weights: Tensor) -> bool:
    return torch.is_grad_enabled() and (hidden.requires_grad or weights.requires_grad)


def _refuse(index: Tensor, experts: int, group: ProcessGroup | None) -> None:
    """Raise an error on every rank that names the rank with indices out of range."""
    wrong = index[(index < 0) | (index >= experts)].unique().tolist()
    error = InvalidArgumentError(
        f"{describe_rank()}: rank {get_rank(group)} of the group routes tokens to experts "
        f"{wrong[:8]}, but they are numbered from 0 to {experts - 1}"
    )
    agree("a call of experts", (), group, error=error if wrong else None)

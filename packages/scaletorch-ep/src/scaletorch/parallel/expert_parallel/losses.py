"""Load balance of experts, independent of the layout: losses, counts, a bias without a loss.

Each loss is returned as this rank's partial sum: the sum over all ranks and micro-batches is the
loss of the global batch, as with token losses over the global count, so gradients are sums too.
Counts have no gradient and are summed over the ranks; tensors with a gradient are never sent.
Recomputation repeats the same numbers and counts nothing twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...dist import all_reduce
from ...dist.building import sum_dtype
from ...dist.errors import InvalidArgumentError
from ..pg_manager import axis_group, describe_rank


def sequence_balance_loss(
    scores: Tensor,
    top_k_index: Tensor,
    sequences: int,
    *,
    sequence_of: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return this rank's partial sum of the balance loss of each sequence, averaged over sequences.

    For one sequence of T tokens, N experts and K choices a token: sum over i of f_i P_i with
    f_i = N / (K T) * (tokens that chose i), which has no gradient, and P_i the mean over the
    sequence of s_i / (sum over j of s_j). Multiply it by the coefficient. Source: DeepSeek-V3
    (arXiv 2412.19437), equations 17 to 20. Micro-batches, padding and packing change nothing.

    Args:
        scores: The router's affinities for every expert, at least 0, float [..., N].
        top_k_index: Chosen experts, integers [..., K] of the same tokens.
        sequences: Number of sequences in the global batch: of all ranks and micro-batches.
        sequence_of: Sequence of each token, integers [...] from 0, or -1 for padding; the same
            numbers on all ranks of `group`. None: tokens are [B, S], a sequence a row, no padding.
        group: Ranks that have shards of the same sequences; None is the manager's cp axis.

    Returns:
        A scalar, float32 at least.

    Raises:
        InvalidArgumentError: Shapes do not fit.
    """
    group = axis_group("cp", group)
    _check(scores, top_k_index)
    if sequence_of is None:
        if scores.dim() != 3:
            raise InvalidArgumentError(
                f"{describe_rank()}: scores {tuple(scores.shape)} are not [B, S, N]: pass "
                "sequence_of, the number of each token's sequence"
            )
        known = len(scores)
        rows = torch.arange(known, device=scores.device)
        sequence_of = rows.unsqueeze(1).expand(scores.shape[:2])
    else:
        known = _largest(sequence_of.reshape(-1), group) + 1
    flat, valid = sequence_of.reshape(-1), sequence_of.reshape(-1) >= 0
    mine, experts = flat[valid], scores.shape[-1]
    index = top_k_index.reshape(-1, top_k_index.shape[-1])[valid]
    affinities = scores.reshape(-1, experts)[valid].to(sum_dtype(scores.dtype))
    affinities = affinities / affinities.sum(-1, keepdim=True)
    counts = index.new_zeros((known, experts + 1), dtype=torch.int64)
    places = torch.cat((index, torch.full_like(index[:, :1], experts)), 1)  # the last counts tokens
    cells = (mine.unsqueeze(1) * (experts + 1) + places).reshape(-1)
    counts.view(-1).index_add_(0, cells, torch.ones_like(cells, dtype=torch.int64))
    all_reduce(counts, "sum", group)
    chosen, lengths = counts.to(affinities.dtype).split((experts, 1), 1)
    weights = chosen * (experts / index.shape[1]) / lengths.clamp(min=1) ** 2
    loss: Tensor = (weights[mine] * affinities).sum() / sequences
    return loss


def global_balance_loss(
    scores: Tensor,
    top_k_index: Tensor,
    *,
    counts: Tensor | None = None,
    valid: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return this rank's partial sum of the balance loss of the global batch.

    For T tokens of the global batch, N experts and K choices: sum over i of f_i P_i with
    f_i = N / (K T) * (tokens that chose i), which has no gradient, and P_i the mean of s_i over all
    T tokens. Multiply it by the coefficient. Source: Switch Transformers (arXiv 2101.03961),
    equations 4 to 6, with f_i over the global batch as in arXiv 2501.11873.

    It is the product of two means over the global batch. With several micro-batches, count them all
    first (`count_tokens`, without gradients) and pass the sum over micro-batches and ranks to each
    call; or use `sequence_balance_loss`, which needs only its sequences.

    Args:
        scores: The router's probabilities of every expert, float [..., N].
        top_k_index: Chosen experts, integers [..., K] of the same tokens.
        counts: Tokens that chose each expert in the global batch, int64 [N]. None: this call has
            all tokens of this rank, and they are summed over `group`.
        valid: Mask of the tokens that count, bool [...]; None is all, without padding.
        group: Ranks that hold the global batch; None is the manager's cp_dp axis.

    Returns:
        A scalar, float32 at least.

    Raises:
        InvalidArgumentError: Shapes do not fit.
    """
    _check(scores, top_k_index)
    experts, choices = scores.shape[-1], top_k_index.shape[-1]
    if counts is None:
        counts = count_tokens(top_k_index, experts, valid=valid)
        all_reduce(counts, "sum", axis_group("cp_dp", group))
    kept = scores.reshape(-1, experts)
    if valid is not None:
        kept = kept[valid.reshape(-1)]
    sums = kept.to(sum_dtype(scores.dtype)).sum(0)
    tokens = (counts.sum().to(sums.dtype) / choices).clamp(min=1)
    return (counts.to(sums.dtype) * sums).sum() * (experts / choices) / tokens**2


def move_bias(bias: Tensor, total: Tensor, rate: float) -> None:
    """Adjust a bias [N] in place by the experts' token counts on all ranks, int64 [N].

    b_i <- b_i + rate * sign(mean of c - c_i). Source: arXiv 2408.15664, algorithm 1.
    """
    # mean of c - c_i has the sign of sum of c - N c_i, which is exact.
    with torch.no_grad():
        bias += rate * torch.sign(total.sum() - len(total) * total).to(bias.dtype)


def count_tokens(top_k_index: Tensor, experts: int, *, valid: Tensor | None = None) -> Tensor:
    """Return the number of local tokens that chose each expert, int64 [experts]; nothing is sent.

    Args:
        top_k_index: Chosen experts, integers [..., K].
        experts: Number of experts.
        valid: Mask of the tokens that count, bool [...]; None is all.
    """
    index = top_k_index if valid is None else top_k_index[valid]
    counts = top_k_index.new_zeros(experts, dtype=torch.int64)
    flat = index.reshape(-1).long()
    return counts.index_add_(0, flat, torch.ones_like(flat))


@dataclass(frozen=True, slots=True)
class RoutingStatistics:
    """Statistics of the routing, for the log."""

    tokens: tuple[int, ...]  # number of tokens that chose each expert
    entropy: float  # of their shares, in nats; log(number of experts) if all are equal
    fullest: float  # tokens of the fullest expert over the mean; 1 if all are equal
    unused: int  # number of experts without tokens


def statistics_of(total: Tensor) -> RoutingStatistics:
    """Return the statistics of the counts of all ranks, int64 [N]."""
    shares = total.double() / total.sum().clamp(min=1)
    return RoutingStatistics(
        tokens=tuple(total.tolist()),
        entropy=float(torch.special.entr(shares).sum()),
        fullest=float(shares.max() * len(total)),
        unused=int((total == 0).sum()),
    )


def _check(scores: Tensor, index: Tensor) -> None:
    if scores.shape[:-1] != index.shape[:-1] or index.is_floating_point():
        raise InvalidArgumentError(
            f"{describe_rank()}: expected scores [..., N] and integer choices [..., K] of the same "
            f"tokens, got {tuple(scores.shape)} and {index.dtype} {tuple(index.shape)}"
        )


def _largest(sequence_of: Tensor, group: ProcessGroup | None) -> int:
    """Return the largest sequence number on any rank, or -1 if there is none."""
    none = sequence_of.new_full((1,), -1)
    most = torch.cat((sequence_of, none)).max().long()
    all_reduce(most, "max", group)
    return int(most)

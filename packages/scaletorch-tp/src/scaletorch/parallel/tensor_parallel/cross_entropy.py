"""Cross entropy over a sharded vocabulary, without gathering logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...dist import all_gather, get_rank, get_world_size
from ...dist.errors import InvalidArgumentError, StateError
from ...dist.functional import Copy, spmd_local, spmd_type
from ..pg_manager import axis_group, describe_rank
from ..pg_manager.building import uncompiled
from ..placement import shard_sizes

REDUCTIONS = ("none", "sum", "mean")
BLOCK = 2**17  # logits per block on a CPU: as float32 they fit a core's cache


@uncompiled
def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    group: ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """Return the cross entropy of logits whose last dim is sharded over the ranks.

    Each rank sends three numbers per token (four with smoothing) in one collective in forward;
    backward sends nothing. It computes blocks of rows, in float32 (float64 for float64 logits).
    Saved for backward are the logits and two numbers per token.

    Args:
        logits: [..., V_local], this rank's shard of the vocabulary; shards are in the group's
            order and may differ in length.
        targets: [...], int64 ids in the full vocabulary, the same on every rank.
        ignore_index: Tokens with this target are ignored.
        reduction: "none" (zero for ignored tokens), "sum", or "mean" over the tokens that are
            not ignored (NaN if there are none).
        label_smoothing: Weight of each target, from 0 to 1, that is spread over the vocabulary.
        z_loss: Adds `z_loss * logsumexp(logits) ** 2` for every token that is not ignored, which
            keeps logits from drifting (PaLM, arXiv:2204.02311).
        group: Ranks of the tensor-parallel axis; None means that axis of the current manager.
        vocab_size: Size of the full vocabulary, if it is divided as in this package (equal shards,
            or one more on the first ranks). Without it the ranks first exchange the sizes of their
            shards, which waits for the accelerator.

    Returns:
        The loss, the same on every rank: float64 for float64 logits, else float32. Its gradient
        has the logits' dtype and cannot be differentiated again.

    Raises:
        InvalidArgumentError: Shapes, dtypes or options do not fit, or a target on the CPU is out of
            range. On other devices such a target fails like an index out of range.
        StateError: Backward is called with `create_graph=True`.
    """
    _check_options(reduction, label_smoothing, z_loss)
    _check_tensors(logits, targets)
    group = axis_group("tp", group)
    lengths = _lengths(logits, group, vocab_size)
    ignored = targets == ignore_index
    if targets.device.type == "cpu":  # on other devices the check would wait for the device
        _check_targets(targets, ignored, sum(lengths), ignore_index)
    terms = _Terms(label_smoothing, z_loss, lengths, get_rank(group), group)
    function: type[torch.autograd.Function] = CrossEntropy
    losses: Tensor = function.apply(logits, targets, ignored, terms)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / ignored.logical_not().sum()


@dataclass(frozen=True, slots=True)
class _Terms:
    """The weights of the loss terms, and the division of the vocabulary."""

    smoothing: float
    z: float
    lengths: tuple[int, ...]
    rank: int
    group: ProcessGroup | None

    def place(self, targets: Tensor, ignored: Tensor) -> tuple[Tensor, Tensor]:
        """Return the targets' indices in this rank's shard, and a mask of those outside it."""
        # Targets of other ranks get index 0. An invalid target stays out of range on every rank.
        first = sum(self.lengths[: self.rank])
        last = first + self.lengths[self.rank]
        elsewhere = ignored | ((targets >= 0) & (targets < first))
        elsewhere |= (targets >= last) & (targets < sum(self.lengths))
        return (targets - first).masked_fill_(elsewhere, 0), elsewhere


class CrossEntropy(torch.autograd.Function):
    """The loss of every token; backward recomputes softmax in the gradient's memory."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, ignored: Tensor, terms: _Terms
    ) -> Tensor:
        """Return the loss of each token [T], the same on every rank."""
        index, elsewhere = terms.place(targets, ignored)
        local = _statistics(logits, index, elsewhere, terms)
        highest, total, target, *spread = _combined(local, terms)
        ctx.terms, ctx.way = terms, (Copy, terms.group)
        ctx.save_for_backward(logits, targets, ignored, highest, total)
        log_total = total.log()
        losses = log_total - target * (1 - terms.smoothing)
        if spread:
            losses -= spread[0] * (terms.smoothing / sum(terms.lengths))
        if terms.z:
            losses += (highest + log_total).square_().mul_(terms.z)
        return losses.masked_fill_(ignored, 0)

    @staticmethod
    def spmd_typecheck(
        losses: Tensor, *, logits: Tensor, targets: Tensor, ignored: Tensor, terms: _Terms
    ) -> None:
        """Give the losses the type of a sum over the shards of the vocabulary."""
        terms_of_sum = losses.new_empty(losses.shape)
        spmd_local(terms_of_sum, logits, targets, ignored)
        spmd_local(losses, spmd_type(terms_of_sum, terms.group, "all_reduce", "P", "I"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of this rank's logits."""
        if torch.is_grad_enabled():  # once_differentiable would not notice a constant `grad`
            raise StateError(
                "the gradient of vocab_parallel_cross_entropy cannot be differentiated again; call "
                "backward without create_graph=True"
            )
        logits, targets, ignored, highest, total = ctx.saved_tensors
        terms: _Terms = ctx.terms
        index, elsewhere = terms.place(targets, ignored)
        grad = grad.masked_fill(ignored, 0)
        softmax = grad / total  # factor of exp(x - highest)
        if terms.z:
            softmax *= 1 + 2 * terms.z * (highest + total.log())
        hit = (grad * (terms.smoothing - 1)).masked_fill_(elsewhere, 0)
        spread = grad * (terms.smoothing / sum(terms.lengths))
        result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        for out, x, *rows in _blocks(result, logits, index, highest, softmax, hit, spread):
            at, high, scale, step, even = (row.unsqueeze(-1) for row in rows)
            x = x.to(high.dtype)  # as in forward
            y = torch.sub(x, high, out=out if out.dtype == x.dtype else x)
            y.exp_().mul_(scale)
            if terms.smoothing:
                y -= even
            y.scatter_add_(-1, at, step)
            if y is not out:
                out.copy_(y)
        return result, None, None, None


def _statistics(logits: Tensor, index: Tensor, elsewhere: Tensor, terms: _Terms) -> Tensor:
    """Return the statistics of this rank's logits for every token, [3, ...] or [4, ...]."""
    # The highest logit, the sum of exp(logit - highest), the target's logit (0 if on another rank),
    # and with smoothing the sum of logit - highest.
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    found = logits.new_zeros((4 if terms.smoothing else 3, *index.shape), dtype=dtype)
    found[0] = -math.inf
    for x, at, away, highest, total, target, *spread in _blocks(logits, index, elsewhere, *found):
        x = x.to(dtype)  # a copy for 16-bit logits, then changed in place
        highest.copy_(x.amax(-1))
        target.copy_(x.gather(-1, at.unsqueeze(-1)).squeeze(-1)).masked_fill_(away, 0)
        shift = _finite(highest).unsqueeze(-1)
        y = x - shift if logits.dtype == dtype else x.sub_(shift)
        if spread:
            spread[0].copy_(y.sum(-1))
        total.copy_(y.exp_().sum(-1))
    return found


def _combined(local: Tensor, terms: _Terms) -> list[Tensor]:
    """Return the statistics of the full vocabulary; the last ones relative to its highest logit."""
    # Combined in rank order, so the bits are the same on all ranks, and a NaN reaches all of them,
    # as a max all-reduce does not guarantee.
    gathered = all_gather(local, terms.group) if len(terms.lengths) > 1 else [local]
    highest = torch.stack([statistics[0] for statistics in gathered]).amax(0)
    result = [highest, torch.zeros_like(highest), -highest]
    if terms.smoothing:
        result.append(torch.zeros_like(highest))
    for statistics, length in zip(gathered, terms.lengths, strict=True):
        result[1] += statistics[1] * (statistics[0] - highest).exp_()
        result[2] += statistics[2]
        if terms.smoothing:
            result[3] += statistics[3] + (_finite(statistics[0]) - highest) * length
    return result


def _finite(highest: Tensor) -> Tensor:
    """Return the highest logits with 0 for -inf, so that they can be subtracted."""
    return highest.masked_fill(highest == -math.inf, 0)


def _blocks(x: Tensor, *more: Tensor, limit: int = 0) -> Iterator[tuple[Tensor, ...]]:
    """Yield blocks of full rows (the last dim of `x`) of all tensors with its leading dims."""
    tensors = x, *more
    limit = limit or (BLOCK if x.device.type == "cpu" else max(BLOCK, x.numel() // 32))
    rows_each = math.prod(x.shape[1:])
    if x.dim() == 1:
        yield from _blocks(*(tensor.unsqueeze(0) for tensor in tensors))
    elif x.dim() > 2 and rows_each > limit:
        for slices in zip(*tensors, strict=True):
            yield from _blocks(*slices, limit=limit)
    elif x.numel():
        length = max(1, limit // rows_each)
        yield from zip(*(tensor.split(length) for tensor in tensors), strict=True)


def _lengths(logits: Tensor, group: ProcessGroup | None, vocab_size: int | None) -> tuple[int, ...]:
    """Return the size of each rank's shard of the vocabulary."""
    size, length = get_world_size(group), logits.shape[-1]
    if vocab_size is not None:
        lengths = shard_sizes(vocab_size, size)
        if length != lengths[get_rank(group)]:
            raise InvalidArgumentError(
                f"{describe_rank()}: of a vocabulary of {vocab_size} over tp = {size} this rank's "
                f"share is {lengths[get_rank(group)]}, but its logits have {length} in their last "
                "dim; without vocab_size shards may have any length"
            )
        return lengths
    if size == 1:
        return (length,)
    gathered = all_gather(torch.tensor([length]), group)
    return tuple(torch.cat(gathered).tolist())


def _check_options(reduction: str, label_smoothing: float, z_loss: float) -> None:
    if reduction not in REDUCTIONS:
        raise InvalidArgumentError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise InvalidArgumentError(f"label_smoothing must be from 0 to 1, got {label_smoothing}")
    if not 0 <= z_loss < math.inf:
        raise InvalidArgumentError(f"z_loss must be finite and not negative, got {z_loss}")


def _check_tensors(logits: Tensor, targets: Tensor) -> None:
    if not logits.is_floating_point() or logits.dim() == 0:
        raise InvalidArgumentError(
            f"{describe_rank()}: expected floating-point logits [..., V_local], got {logits.dtype} "
            f"of shape {tuple(logits.shape)}"
        )
    place = logits.shape[:-1], logits.device
    if targets.dtype != torch.int64 or (targets.shape, targets.device) != place:
        raise InvalidArgumentError(
            f"{describe_rank()}: logits of shape {tuple(logits.shape)} on {logits.device} need "
            f"int64 targets of shape {tuple(logits.shape[:-1])} (the vocabulary is the last dim) "
            f"there, got {targets.dtype} of shape {tuple(targets.shape)} on {targets.device}"
        )


def _check_targets(targets: Tensor, ignored: Tensor, vocab_size: int, ignore_index: int) -> None:
    wrong = ((targets < 0) | (targets >= vocab_size)) & ~ignored
    if bool(wrong.any()):
        found = targets[wrong].unique()[:4].tolist()
        raise InvalidArgumentError(
            f"{describe_rank()}: targets must be ids from 0 to {vocab_size - 1} or ignore_index = "
            f"{ignore_index}, got {', '.join(map(str, found))}; is vocab_size the whole one?"
        )

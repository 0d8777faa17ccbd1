"""The loss of all strategies: the sum of token losses divided by the tokens of the global batch.

The mean is the same on every rank. Each rank's backward gives only its own contribution to the
gradients, which must be summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ...dist import all_reduce, functional
from ...dist.errors import InvalidArgumentError
from .manager import axis_group, describe_rank

IGNORED = -100
"""The label of a token that does not count."""


def token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the cross entropies of all valid tokens, in float32 at least.

    Args:
        logits: [B, L, V] floating point.
        labels: [B, L] int64, aligned with the logits, -100 for ignored tokens.

    Raises:
        InvalidArgumentError: The shapes do not match.
    """
    if logits.shape[:-1] != labels.shape:
        raise InvalidArgumentError(
            f"{describe_rank()}: labels of shape {tuple(labels.shape)} do not fit an output of "
            f"shape {tuple(logits.shape)}: expected [B, L] and [B, L, V]; pass loss_fn=... for "
            "another loss"
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def global_token_count(
    labels: Tensor | Iterable[Tensor],
    ignore_index: int = IGNORED,
    group: ProcessGroup | None = None,
) -> int:
    """Count the valid tokens of the global batch.

    Args:
        labels: This rank's labels as the loss sees them, integers of any shape; or an iterable of
            those of all microbatches of the step.
        ignore_index: The label of ignored tokens.
        group: The ranks that share the batch, by default the `cp_dp` axis.

    Returns:
        The number of labels other than `ignore_index` over all ranks of the group.

    Raises:
        InvalidArgumentError: Labels are not integer tensors.
    """
    count = 0
    several = isinstance(labels, Iterable) and not isinstance(labels, Tensor)
    for each in labels if several else [labels]:
        if not isinstance(each, Tensor) or each.is_floating_point() or each.is_complex():
            given = each.dtype if isinstance(each, Tensor) else type(each).__name__
            raise InvalidArgumentError(f"labels must be integer tensors, got {given}")
        count += int((each != ignore_index).sum())
    return int(_sum_counts(count, axis_group("cp_dp", group)))


def global_token_mean(
    loss_sum: Tensor, count: int | float | Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """Return the mean loss over the global batch, the same on every rank.

    Each rank's backward gives only its own contribution to the gradients. Sum them over the ranks,
    as wrappers with `op="sum"` (the default) do.

    Args:
        loss_sum: The sum of this rank's token losses, one floating-point element.
        count: This rank's number of valid tokens, or the sum of their weights; 0 is fine. Integers
            are summed exactly, others in float64.
        group: The ranks that share the batch, by default the `cp_dp` axis.

    Returns:
        The sum of all ranks' `loss_sum` divided by the sum of all counts, or 0 with zero gradients
        if all counts are 0. Same shape and dtype as `loss_sum`.

    Raises:
        InvalidArgumentError: `loss_sum` is not one floating-point element, or `count` is not
            a finite number of at least 0.
    """
    return mean_over(loss_sum, count, axis_group("cp_dp", group))


def mean_over(loss_sum: Tensor, count: int | float | Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the mean of `global_token_mean` over exactly this group; None means one process."""
    fits = isinstance(loss_sum, Tensor) and loss_sum.is_floating_point() and loss_sum.numel() == 1
    if not fits:
        given = tuple(loss_sum.shape) if isinstance(loss_sum, Tensor) else type(loss_sum).__name__
        message = f"loss_sum must be a floating-point tensor of one element, got {given}"
        raise InvalidArgumentError(message)
    number = count.detach().item() if isinstance(count, Tensor) and count.numel() == 1 else count
    if not isinstance(number, int | float) or not 0 <= number < float("inf"):
        raise InvalidArgumentError(f"count must be a finite number of at least 0, got {count!r}")
    total = _sum_counts(number, group)
    if total == 0:
        # Keep the graph, so that backward reaches the parameters and their hooks on this rank.
        return loss_sum.nan_to_num(0.0, 0.0, 0.0) * 0.0
    if group is not None:
        wide = loss_sum.to(torch.promote_types(loss_sum.dtype, torch.float32))
        return (functional.reduce(wide, group) / total).to(loss_sum.dtype)
    return loss_sum / total


def _sum_counts(number: int | float, group: ProcessGroup | None) -> int | float:
    if group is None:
        return number
    whole = isinstance(number, int)
    sums = torch.tensor([number, 0] if whole else [0, 1])  # integers, and how many are none
    all_reduce(sums, "sum", group=group)
    total, fractional = sums.tolist()
    if not fractional:
        return int(total)
    weights = torch.tensor(0.0 if whole else number, dtype=torch.float64)
    all_reduce(weights, "sum", group=group)
    return float(total + weights.item())

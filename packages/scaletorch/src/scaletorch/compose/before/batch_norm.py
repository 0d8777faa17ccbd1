"""Batch normalisation: over the rows of all data-parallel ranks, as one process has them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm

from ...dist import functional
from ...dist.errors import InvalidArgumentError
from ...parallel.pg_manager import ProcessGroupManager


def norms_of(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the modules whose output depends on all rows of a batch while they train."""
    return {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}


def synchronise_batch_norms(
    model: nn.Module, manager: ProcessGroupManager, *, recompute: bool, shares: bool
) -> None:
    """Let batch norms take their statistics of the rows of all dp ranks, in place.

    Args:
        model: The plain model.
        manager: The grid.
        recompute: Layers run again in backward.
        shares: Each tp rank holds a shard of every sequence.

    Raises:
        InvalidArgumentError: Their statistics would be others than one process's.
    """
    found = norms_of(model)
    _require_fit(found, recompute=recompute, shares=shares)
    if manager.dp_size > 1 and not shares:  # where shares are, they do not train
        _require_known(found)
        for norm in found.values():
            vars(norm)["_scaletorch_rows"] = manager.dp_group
            vars(norm)["forward"] = MethodType(_forward, norm)


def require_whole_batches(
    model: nn.Module,
    num_micro_batches: int,
    manager: ProcessGroupManager,
    *,
    recompute: bool,
    shares: bool,
) -> None:
    """Refuse batch norms whose statistics would not be of the whole batch.

    Those in eval mode, which have running statistics, change nothing and pass.

    Args:
        model: What trains.
        num_micro_batches: Of one step.
        manager: The grid.
        recompute: As for `synchronise_batch_norms`.
        shares: As for `synchronise_batch_norms`.

    Raises:
        InvalidArgumentError: There is one, and several micro-batches, divided sequences, or rows on
            other ranks that it does not see.
    """
    found = {name: norm for name, norm in norms_of(model).items() if _of_batch(norm)}
    if not found:
        return
    _require_fit(found, recompute=recompute, shares=shares)
    alone = {name: norm for name, norm in found.items() if "_scaletorch_rows" not in vars(norm)}
    if manager.dp_size > 1 and alone:
        raise InvalidArgumentError(
            f"{_named(alone)} takes statistics of this rank's rows alone, and dp_size="
            f"{manager.dp_size} divides those of a batch: let parallelize have it, which sums over "
            "ranks, or use another norm, or put the module into eval mode"
        )
    if num_micro_batches > 1:
        raise InvalidArgumentError(
            f"{_named(found)} takes statistics of all rows of a batch, and {num_micro_batches} "
            "micro-batches would each have their own: use one micro-batch, or another norm "
            "(LayerNorm, GroupNorm), or put the module into eval mode"
        )
    if manager.cp_size > 1:
        raise InvalidArgumentError(
            f"{_named(found)} takes statistics of all positions of a batch, which cp_size="
            f"{manager.cp_size} divides over ranks: use cp_size=1, or another norm, or put the "
            "module into eval mode"
        )


def _require_fit(found: Mapping[str, _BatchNorm], *, recompute: bool, shares: bool) -> None:
    """Refuse norms that take statistics of a batch where these would be others."""
    found = {name: norm for name, norm in found.items() if _of_batch(norm)}
    if found and recompute:
        raise InvalidArgumentError(
            f"{_named(found)} would count every batch twice in its running statistics, as "
            "recompute=True runs layers again: leave recompute out, or use another norm"
        )
    if found and shares:
        raise InvalidArgumentError(
            f"{_named(found)} would take statistics of a rank's share of the tokens with "
            "sequence_parallel=True: leave that out, or use another norm"
        )


def _require_known(found: Mapping[str, _BatchNorm]) -> None:
    """Refuse norms with a forward of their own, which that of all ranks' rows would replace."""
    own = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    other = {n: m for n, m in found.items() if type(m).forward not in own or "forward" in vars(m)}
    if other:
        raise InvalidArgumentError(
            f"{_named(other)} has a forward of its own, so that its statistics cannot be taken of "
            "the rows of all dp ranks: use a norm of torch.nn and put what it adds (such as an "
            "activation) behind that, or another norm, or dp_size=1"
        )


def _named(found: Mapping[str, Any]) -> str:
    name, norm = next(iter(found.items()))
    others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"module {name} ({type(norm).__name__}){others}"


def _of_batch(norm: _BatchNorm) -> bool:
    return norm.training or norm.running_mean is None


def _forward(self: _BatchNorm, x: Tensor) -> Tensor:
    """Normalise as `torch.nn.functional.batch_norm` would normalise all ranks' rows together."""
    self._check_input_dim(x)
    if not _of_batch(self):
        own: Tensor = type(self).forward(self, x)
        return own
    group: ProcessGroup | None = vars(self)["_scaletorch_rows"]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    shape = (1, -1, *[1] * (x.ndim - 2))
    mean, variance, count = _statistics(wide, group)
    if self.training and self.running_mean is not None:
        _follow(self, mean.detach(), variance.detach(), count)
    y = (wide - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
    if self.weight is not None:
        y = y * self.weight.to(y.dtype).view(shape) + self.bias.to(y.dtype).view(shape)
    return y.to(x.dtype)


def _statistics(x: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance of each channel over all ranks' rows, and of how many elements."""
    dims = [dim for dim in range(x.ndim) if dim != 1]
    count = x.new_tensor([x.numel() / x.shape[1]])
    sums = functional.all_reduce(torch.cat((x.sum(dims), count)), group)
    count = sums[-1:].detach()
    mean = sums[:-1] / count
    centred = x - mean.view(1, -1, *[1] * (x.ndim - 2))
    variance = functional.all_reduce(centred.square().sum(dims), group) / count
    return mean, variance, count


def _follow(norm: _BatchNorm, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    """Update running statistics as torch does: by the variance without bias."""
    held: Any = norm.num_batches_tracked, norm.running_mean, norm.running_var
    batches, running_mean, running_var = held
    batches.add_(1)
    momentum = 1.0 / float(batches) if norm.momentum is None else norm.momentum
    running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    running_var.lerp_((variance * count / (count - 1)).to(running_var.dtype), momentum)

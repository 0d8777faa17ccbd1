"""Batch normalisation over the rows of all data-parallel ranks, as in one process."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm

from ...dist import functional
from ...dist.errors import InvalidArgumentError
from ...parallel.pg_manager import ProcessGroupManager

_GROUP = "_scaletorch_rows"  # attribute of a norm: the group whose rows its statistics cover
_KNOWN = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def synchronise_batch_norms(model: nn.Module, manager: ProcessGroupManager) -> None:
    """Make batch norms take their statistics over the rows of all dp ranks, in place.

    A norm with a custom forward stays as it is.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for norm in norms if manager.dp_size > 1 else ():
        if type(norm).forward in _KNOWN and "forward" not in vars(norm):
            vars(norm)[_GROUP] = manager.dp_group
            vars(norm)["forward"] = MethodType(_forward, norm)


def require_whole_batches(
    model: nn.Module,
    num_micro_batches: int,
    manager: ProcessGroupManager,
    *,
    recompute: bool,
    shares: bool,
) -> None:
    """Refuse batch norms whose statistics would not cover the whole batch.

    Norms in eval mode that have running statistics pass, since they use only these.

    Raises:
        InvalidArgumentError: Micro-batches, ranks or a second run would change the statistics.
    """
    norms = [(n, m) for n, m in model.named_modules() if isinstance(m, _BatchNorm) and _of_batch(m)]
    alone = [(name, norm) for name, norm in norms if _GROUP not in vars(norm)]
    own = manager.dp_size > 1 and alone
    refused = {
        "recompute=True would count them twice": recompute,
        "sequence_parallel=True divides its tokens": shares,
        f"{num_micro_batches} micro-batches would each have their own": num_micro_batches > 1,
        f"cp_size={manager.cp_size} divides its positions": manager.cp_size > 1,
        f"dp_size={manager.dp_size} divides its rows, which parallelize joins only for norms of "
        "torch.nn without a forward of their own": own,
    }
    why = next((words for words, wrong in refused.items() if wrong), None)
    if norms and why:
        name, norm = (alone or norms)[0]
        raise InvalidArgumentError(
            f"module {name} ({type(norm).__name__}) takes statistics of a whole batch, and {why}: "
            "do without that, use another norm (LayerNorm, GroupNorm), or put it into eval mode"
        )


def _of_batch(norm: _BatchNorm) -> bool:
    return norm.training or norm.running_mean is None


def _forward(self: _BatchNorm, x: Tensor) -> Tensor:
    """Normalise as `torch.nn.functional.batch_norm` would on the rows of all ranks."""
    self._check_input_dim(x)
    if not _of_batch(self):
        own: Tensor = type(self).forward(self, x)
        return own
    group: ProcessGroup | None = vars(self)[_GROUP]
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
    """Return the mean, variance and element count of each channel over all ranks' rows."""
    dims = [dim for dim in range(x.ndim) if dim != 1]
    count = x.new_tensor([x.numel() / x.shape[1]])
    sums = functional.all_reduce(torch.cat((x.sum(dims), count)), group)
    count = sums[-1:].detach()
    mean = sums[:-1] / count
    centred = x - mean.view(1, -1, *[1] * (x.ndim - 2))
    variance = functional.all_reduce(centred.square().sum(dims), group) / count
    return mean, variance, count


def _follow(norm: _BatchNorm, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    """Update running statistics as torch does, with the unbiased variance."""
    held: Any = norm.num_batches_tracked, norm.running_mean, norm.running_var
    batches, running_mean, running_var = held
    batches.add_(1)
    momentum = 1.0 / float(batches) if norm.momentum is None else norm.momentum
    running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    running_var.lerp_((variance * count / (count - 1)).to(running_var.dtype), momentum)

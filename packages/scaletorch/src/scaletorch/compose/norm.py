"""The true global gradient norm: every parameter of the plain model counted once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..dist import all_reduce
from ..parallel.data_parallel import DataParallelBucket
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.tensor_parallel import shard_owners


def counted_gradients(model: DataParallelBucket, manager: ProcessGroupManager) -> Iterator[Tensor]:
    """Yield the gradients that this rank adds to the norm.

    A parameter replicated over tp counts on its first rank, one tied across stages on its first.
    """
    owners = shard_owners(model)
    tied: dict[str, tuple[int, ...]] = model.tied_parameters  # of the stage within
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        replica = owners[name] != manager.tp_rank
        if not replica and tied.get(name, (manager.pp_rank,))[0] == manager.pp_rank:
            yield parameter.grad


def global_grad_norm(model: DataParallelBucket, manager: ProcessGroupManager) -> Tensor:
    """Return the 2-norm of the plain model's whole gradient, 0-d, float32 at least, on all ranks.

    Gradients must already be summed over CP x DP, as after ``train_step``.
    """
    parameter = next(model.parameters())
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    total = torch.zeros((), dtype=dtype, device=parameter.device)
    for gradient in counted_gradients(model, manager):
        total += torch.linalg.vector_norm(gradient, dtype=dtype) ** 2
    all_reduce(total, group=manager.tp_group)
    all_reduce(total, group=manager.pp_group)
    return total.sqrt()


def clip_grad_norm_(
    model: DataParallelBucket, max_norm: float, manager: ProcessGroupManager
) -> Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; return the norm."""
    norm = global_grad_norm(model, manager)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm

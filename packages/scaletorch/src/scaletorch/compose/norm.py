"""The true global gradient norm: every parameter of the plain model counted once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..dist import all_reduce
from ..parallel.data_parallel import DataParallelBucket
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.tensor_parallel import split_by_owner


def counted_gradients(model: DataParallelBucket, manager: ProcessGroupManager) -> Iterator[Tensor]:
    """Yield the gradients that this rank adds to the norm.

    What is replicated over tp counts on its first rank, a parameter tied across stages on its
    first.
    """
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    tied: dict[str, tuple[int, ...]] = model.tied_parameters  # of the stage within
    for name, pieces in split_by_owner(model, gradients).items():
        if tied.get(name, (manager.pp_rank,))[0] == manager.pp_rank:
            yield from (piece for owner, piece in pieces if owner == manager.tp_rank)


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

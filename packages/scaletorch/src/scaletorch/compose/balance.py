"""The routers' auxiliary loss of models from transformers, computed over the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..dist import all_reduce
from ..dist.errors import InvalidArgumentError
from ..parallel.expert_parallel import count_tokens, global_balance_loss
from ..parallel.pg_manager import ProcessGroupManager, describe_rank

_INSTEAD = (
    "set output_router_logits=False in the config to train without it, or write the loss yourself "
    "(train_step_pipeline takes a loss_fn) by sequence_balance_loss of "
    "scaletorch.parallel.expert_parallel, which is defined for each sequence"
)


@dataclass(frozen=True, slots=True)
class RouterLoss:
    """A config's `router_aux_loss_coef` and `num_experts_per_tok`."""

    coefficient: float
    top_k: int


def read_router_loss(model: nn.Module, manager: ProcessGroupManager) -> RouterLoss | None:
    """Return the auxiliary loss that the model's config enables, or None."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        factor = getattr(config, "router_aux_loss_coef", None)
        wanted = getattr(config, "output_router_logits", False) is True
        if not (wanted and isinstance(factor, int | float) and factor > 0):
            continue
        top_k: Any = getattr(config, "num_experts_per_tok", None)
        problem = None
        if not isinstance(top_k, int):
            problem = "does not say how many experts a token has (num_experts_per_tok)"
        elif manager.pp_size > 1:
            problem = "takes means over all layers, of which each pipeline stage has some"
        if problem is not None:
            raise InvalidArgumentError(
                f"the config of {type(module).__name__} asks for a router's auxiliary loss "
                f"(output_router_logits=True, router_aux_loss_coef={factor}), which {problem}: "
                f"{_INSTEAD}"
            )
        return RouterLoss(float(factor), top_k)
    return None


def require_one_micro_batch(micro_batches: Sequence[object]) -> None:
    """Refuse several micro-batches, since the loss needs the choices of all tokens at once."""
    if len(micro_batches) > 1:
        raise InvalidArgumentError(
            f"{describe_rank()}: the router's auxiliary loss is a product of two means over the "
            f"global batch, which {len(micro_batches)} micro-batches cannot compute one by one: "
            f"take one micro-batch; or {_INSTEAD}"
        )


def router_loss(
    output: Any,
    wanted: RouterLoss,
    manager: ProcessGroupManager,
    *,
    shares_sequences: bool,
    real: Tensor | None = None,
) -> Tensor:
    """Return this rank's term of the loss, 0-d; those of all cp x dp ranks sum to the whole loss.

    It is `load_balancing_loss_func` of transformers over the global batch (Switch Transformers,
    arXiv 2101.03961, equations 4 to 6). The value is the same on all tp ranks; if
    `shares_sequences`, each has the logits and the gradient of its own tokens. `real` is a mask of
    the tokens that count, bool [B, L].
    """
    given = getattr(output, "router_logits", None)
    if not isinstance(given, tuple | list) or not all(isinstance(x, Tensor) for x in given):
        raise InvalidArgumentError(
            f"{type(output).__name__} has no router_logits, [T, N] of every layer, for the "
            f"auxiliary loss that the config asks for: {_INSTEAD}"
        )
    scores = torch.cat([x.reshape(-1, x.shape[-1]) for x in given]).softmax(-1)
    index = scores.topk(wanted.top_k, dim=-1).indices
    valid = None  # a mask of the rows of all layers' logits
    if real is not None and shares_sequences:
        real = real.tensor_split(manager.tp_size, dim=1)[manager.tp_rank]
    if real is not None:
        valid = real.reshape(-1).repeat(len(given))
    counts = count_tokens(index, scores.shape[-1], valid=valid)
    groups = [manager.cp_dp_group, *([manager.tp_group] if shares_sequences else [])]
    for group in groups:
        all_reduce(counts, group=group)
    loss = global_balance_loss(scores, index, counts=counts, valid=valid)
    loss = loss * wanted.coefficient * wanted.top_k
    if shares_sequences:
        total = loss.detach().clone()
        all_reduce(total, group=manager.tp_group)
        loss = loss + (total - loss).detach()
    return loss

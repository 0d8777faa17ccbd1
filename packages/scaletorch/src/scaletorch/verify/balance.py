"""The routers' auxiliary loss that a model's config asks for, of one process, in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def router_loss(model: nn.Module, output: Any, mask: Tensor | None = None) -> Tensor | float:
    """Return the loss of a whole batch that comes to that of tokens; 0 if none is asked for.

    With N experts and the tokens of all layers in one: coefficient x N x the sum over experts of
    (choices / tokens) x (mean probability). Source: Switch Transformers (arXiv 2101.03961),
    equations 4 to 6, as transformers has it.

    Args:
        model: The plain module; a config of it or of a part says output_router_logits=True and
            router_aux_loss_coef.
        output: The model's, with [T, N] of every layer in `router_logits`.
        mask: Tokens that count, [B, L], not 0; None is all.
    """
    config = next(filter(_asks, (getattr(part, "config", None) for part in model.modules())), None)
    if config is None:
        return 0.0
    logits = torch.stack(output.router_logits)
    if mask is not None:
        logits = logits[:, mask.flatten() != 0]
    scores = logits.flatten(0, 1).softmax(-1)
    chosen = scores.topk(config.num_experts_per_tok).indices
    choices = F.one_hot(chosen, scores.shape[-1]).sum((0, 1))
    often = choices.to(scores.dtype) / len(scores)
    loss: Tensor = config.router_aux_loss_coef * scores.shape[-1] * (often * scores.mean(0)).sum()
    return loss


def _asks(config: Any) -> bool:
    wanted = getattr(config, "output_router_logits", False) is True
    return wanted and getattr(config, "router_aux_loss_coef", 0) > 0

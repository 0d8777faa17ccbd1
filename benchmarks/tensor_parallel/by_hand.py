"""A Llama block divided over the ranks by hand: the least that any library must do.

Plain linear layers on shards. Each half of the block begins and ends with one autograd function,
which communicates once: in forward or in backward, or in both with sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaletorch.models.llama import Block


class Enter(torch.autograd.Function):
    """Identity forward, all_reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Sum the gradient over the ranks."""
        return summed(grads[0])


class Leave(torch.autograd.Function):
    """all_reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the sum of every rank's ``x``."""
        return summed(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Hand the gradient on."""
        return grads[0]


class Gather(torch.autograd.Function):
    """all_gather of the sequence forward, reduce_scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the whole sequence [B, L, H]."""
        return gathered(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return this rank's share of the sum."""
        return scattered(grads[0])


class Scatter(torch.autograd.Function):
    """reduce_scatter of the sequence forward, all_gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return this rank's share of the sum."""
        return scattered(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return the whole gradient."""
        return gathered(grads[0])


def summed(x: Tensor) -> Tensor:
    """Return the sum of every rank's ``x``."""
    x = x.clone()
    dist.all_reduce(x)
    return x


def gathered(x: Tensor) -> Tensor:
    """Join shares [B, L / N, H] along the sequence."""
    parts = x.new_empty((dist.get_world_size() * x.shape[0], *x.shape[1:]))
    dist.all_gather_single(parts, x.contiguous())
    return torch.cat(parts.split(x.shape[0]), 1)


def scattered(x: Tensor) -> Tensor:
    """Sum [B, L, H] over the ranks and keep this rank's share."""
    parts = torch.cat(x.chunk(dist.get_world_size(), 1))
    own = torch.empty_like(parts[: x.shape[0]])
    dist.reduce_scatter_single(own, parts)
    return own


class Half(nn.Module):
    """A half of the block written by hand: its input enters, its output leaves."""

    def __init__(self, inner: nn.Module, enter: Any, leave: Any) -> None:
        super().__init__()
        self.inner, self.enter, self.leave = inner, enter, leave

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        """Run the half on shards."""
        inner: Any = self.inner
        out: Tensor = self.leave.apply(inner(self.enter.apply(x), *rest))
        return out


def divide_heads(block: Block) -> None:
    """Give the attention of this rank its share of the heads."""
    block.self_attn.num_heads //= dist.get_world_size()
    block.self_attn.num_kv_heads //= dist.get_world_size()


def by_hand(block: Block, styles: Mapping[str, str], *, sequence: bool = False) -> nn.Module:
    """Cut every weight of the block, in place.

    Args:
        block: the whole block, equal on every rank.
        styles: name of a linear layer -> "column" or "row".
        sequence: between the halves each rank holds its share of the sequence.
    """
    for name, style in styles.items():
        layer: Any = block.get_submodule(name)
        shards = layer.weight.detach().chunk(dist.get_world_size(), 0 if style == "column" else 1)
        layer.weight = nn.Parameter(shards[dist.get_rank()].contiguous())
    divide_heads(block)
    enter, leave = (Gather, Scatter) if sequence else (Enter, Leave)
    block.self_attn = Half(block.self_attn, enter, leave)  # type: ignore[assignment]
    block.mlp = Half(block.mlp, enter, leave)
    return block


def sum_norms(block: nn.Module) -> None:
    """Sum the norms' gradients over the ranks: each saw its share of the tokens alone."""
    norms = [p for name, p in block.named_parameters() if "norm" in name and p.grad is not None]
    total = torch.cat([torch.as_tensor(p.grad) for p in norms])
    dist.all_reduce(total)
    for parameter, grad in zip(norms, total.split([p.numel() for p in norms]), strict=True):
        parameter.grad = grad

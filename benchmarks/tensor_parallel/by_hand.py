"""A Llama block sharded over the ranks by hand: the minimum that any library must do.

Plain linear layers on shards. Each half of the block begins and ends with one autograd function,
which communicates once: in forward or in backward, or in both with sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaletorch.models.llama import Block

Call = Callable[[Tensor], Tensor]


class Communicate(torch.autograd.Function):
    """A call in forward, and its transpose in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, transpose: Call) -> Tensor:
        """Return the result of the call on `x`."""
        ctx.transpose = transpose
        return call(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the result of the transpose on the gradient."""
        return ctx.transpose(grads[0]), None, None


def as_it_is(x: Tensor) -> Tensor:
    """Return `x`."""
    return x.view_as(x)


def summed(x: Tensor) -> Tensor:
    """Return the sum of all ranks' `x`."""
    x = x.clone()
    dist.all_reduce(x)
    return x


def gathered(x: Tensor) -> Tensor:
    """Gather sequence shards [B, L / N, H] along the sequence."""
    parts = x.new_empty((dist.get_world_size() * x.shape[0], *x.shape[1:]))
    dist.all_gather_single(parts, x.contiguous())
    return torch.cat(parts.split(x.shape[0]), 1)


def scattered(x: Tensor) -> Tensor:
    """Sum [B, L, H] over the ranks and keep this rank's sequence shard."""
    parts = torch.cat(x.chunk(dist.get_world_size(), 1))
    own = torch.empty_like(parts[: x.shape[0]])
    dist.reduce_scatter_single(own, parts)
    return own


class Half(nn.Module):
    """A half of the block written by hand.

    Args:
        inner: The half on shards.
        enter: Makes the input of the shards; also applied to the output's gradient.
        leave: Sums the output over the ranks; also applied to the input's gradient.
    """

    def __init__(self, inner: nn.Module, enter: Call, leave: Call) -> None:
        super().__init__()
        self.inner, self.enter, self.leave = inner, enter, leave

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        """Run the half on shards."""
        inner: Any = self.inner
        communicate: Any = Communicate.apply
        x = communicate(x, self.enter, self.leave)
        out: Tensor = communicate(inner(x, *rest), self.leave, self.enter)
        return out


def divide_heads(block: Block) -> None:
    """Set this rank's number of heads."""
    block.self_attn.num_heads //= dist.get_world_size()
    block.self_attn.num_kv_heads //= dist.get_world_size()


def by_hand(block: Block, styles: Mapping[str, str], *, sequence: bool = False) -> nn.Module:
    """Shard every weight of the block, in place.

    Args:
        block: The full block, equal on every rank.
        styles: "column" or "row" by name of a linear layer.
        sequence: Whether each rank holds a sequence shard between the halves.
    """
    for name, style in styles.items():
        layer: Any = block.get_submodule(name)
        shards = layer.weight.detach().chunk(dist.get_world_size(), 0 if style == "column" else 1)
        layer.weight = nn.Parameter(shards[dist.get_rank()].contiguous())
    divide_heads(block)
    enter, leave = (gathered, scattered) if sequence else (as_it_is, summed)
    block.self_attn = Half(block.self_attn, enter, leave)  # type: ignore[assignment]
    block.mlp = Half(block.mlp, enter, leave)
    return block


def sum_norms(block: nn.Module) -> None:
    """Sum the norms' gradients over the ranks, since each saw only its sequence shard."""
    norms = [p for name, p in block.named_parameters() if "norm" in name and p.grad is not None]
    total = torch.cat([torch.as_tensor(p.grad) for p in norms])
    dist.all_reduce(total)
    for parameter, grad in zip(norms, total.split([p.numel() for p in norms]), strict=True):
        parameter.grad = grad

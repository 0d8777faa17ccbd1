"""Expert parallelism written by hand for one block: sort pairs by expert, two all-to-alls.

Gradients of the weights are written once, those of tokens by the faster kernel. That needs special
code for the experts: a loop over `unbind`, or `grouped_mm` if theirs uses it. A second way leaves
the experts' own code unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from .block import Block, Experts, GroupedExperts, grouped, one


def _exchange(rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
    function: Any = _Exchange
    came: Tensor = function.apply(rows, sends, receives)
    return came


class _Exchange(Function):
    """Send rows to other ranks; backward sends gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        ctx.counts = sends, receives
        came = rows.new_empty((sum(receives), rows.shape[1]))
        dist.all_to_all_single(came, rows, list(receives), list(sends))
        return came

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sends, receives = ctx.counts
        back = grads[0].new_empty((sum(sends), grads[0].shape[1]))
        dist.all_to_all_single(back, grads[0].contiguous(), list(sends), list(receives))
        return back, None, None


class ByHand(nn.Module):
    """This rank's experts, with the exchange of tokens with the other ranks.

    Args:
        whole: All experts; an equal number goes to each rank.
    """

    def __init__(self, whole: Experts) -> None:
        super().__init__()
        self.ranks = dist.get_world_size()
        self.own = whole.num_experts // self.ranks
        rows = slice(dist.get_rank() * self.own, (dist.get_rank() + 1) * self.own)
        self.experts = whole
        for name, parameter in list(whole.named_parameters()):
            setattr(whole, name, nn.Parameter(parameter.detach()[rows].clone()))

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return [T, H], as all experts in one process would."""
        top_k, experts = top_k_index.shape[1], self.own * self.ranks
        chosen, order = top_k_index.flatten().sort(stable=True)
        counts = torch.bincount(chosen, minlength=experts)
        heard = torch.empty_like(counts)
        dist.all_to_all_single(heard, counts)
        sends = counts.view(self.ranks, -1).sum(1).tolist()
        heard = heard.view(self.ranks, -1)
        receives, sizes = heard.sum(1).tolist(), heard.flatten().tolist()
        came = _exchange(hidden.index_select(0, order // top_k), sends, receives)
        pieces = came.split(sizes)  # by rank, then by expert
        mine = [torch.cat(pieces[expert :: self.own]) for expert in range(self.own)]
        done = self.compute(mine)
        parts = [each.split(sizes[at :: self.own]) for at, each in enumerate(done)]
        back = torch.cat([parts[e][r] for r in range(self.ranks) for e in range(self.own)])
        rows = _exchange(back, receives, sends)
        found = torch.empty_like(rows).index_copy(0, order, rows).view(*top_k_index.shape, -1)
        result: Tensor = (found * top_k_weights[..., None]).sum(1)
        return result

    def compute(self, mine: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the results of each expert's rows."""
        stacks = self.experts.gate_up_proj, self.experts.down_proj
        if isinstance(self.experts, GroupedExperts):
            sizes = [*map(len, mine)]
            results: Sequence[Tensor] = grouped(torch.cat([*mine]), *stacks, sizes).split(sizes)
            return results
        return [
            one(*each) for each in zip(mine, *(stack.unbind() for stack in stacks), strict=True)
        ]


class AroundOwnCode(ByHand):
    """The same exchange around the experts' own code."""

    def compute(self, mine: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the results of each expert's rows."""
        self.experts.num_experts = self.own
        sizes, rows = [len(each) for each in mine], torch.cat([*mine])
        index = torch.arange(self.own).repeat_interleave(torch.tensor(sizes))[:, None]
        results: Tensor = self.experts(rows, index, rows.new_ones(len(rows), 1))
        parts: Sequence[Tensor] = results.split(sizes)
        return parts


def by_hand(block: Block) -> nn.Module:
    """Shard the experts of a block over the ranks, in place."""
    whole = block.experts
    block.experts = ByHand(whole)  # type: ignore[assignment]
    return block


def around_own_code(block: Block) -> nn.Module:
    """Shard the experts, keeping their own code, in place."""
    whole = block.experts
    block.experts = AroundOwnCode(whole)  # type: ignore[assignment]
    return block

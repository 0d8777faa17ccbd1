"""Helpers for tests of whole models: a model, a batch, and whole gradients to compare."""

import torch
import torch.distributed as c10d
from torch import nn
from torch.utils.checkpoint import checkpoint

from scaletorch.parallel.expert_parallel import find_expert_cuts, gather_experts

HIDDEN, TOKENS = 6, 10


class TwoBlocks(nn.Module):
    """Two blocks in float64, the same on every rank; the caller writes to what they return."""

    def __init__(self, make):
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(make() for _ in range(2))
        self.double()

    def forward(self, x, recompute=False):
        for block in self.blocks:
            out = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
            out = out[0] if isinstance(out, tuple) else out
            out += x
            x = out
        return x


def random_tokens(*shape, seed=7):
    """Return [*shape, HIDDEN], the same each time."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, HIDDEN, generator=generator).double()


def gradients(model):
    """Return the gradients of a model by names, zeros where there is none."""
    named = model.named_parameters()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}


def whole_gradients(model):
    """Return those of all ranks: summed where all have a part, and of experts gathered."""
    found, cuts = gradients(model), find_expert_cuts(model)
    for name, gradient in found.items():
        if name not in cuts:
            c10d.all_reduce(gradient)
    return gather_experts(model, found)

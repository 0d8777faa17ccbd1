"""Blocks of experts, and gradients to compare."""

import torch
import torch.distributed as c10d
from torch import nn
from torch.utils.checkpoint import checkpoint

from scaletorch.parallel.expert_parallel import find_expert_cuts, gather_experts

HIDDEN, WIDTH, TOP_K, EXPERTS, TOKENS = 6, 4, 3, 5, 10


class Stacked(nn.Module):
    """As most models': calls each expert in turn, and has more stacks than matrices."""

    def __init__(self, experts=EXPERTS):
        super().__init__()
        self.num_experts, self.num_experts_per_tok = experts, TOP_K
        self.up = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH))
        self.bias = nn.Parameter(torch.randn(experts, WIDTH))
        self.down = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN))
        self.register_buffer("scale", 1 + torch.rand(experts))

    def forward(self, hidden, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, slot = torch.where(top_k_index == expert)
            if len(token):
                states = torch.tanh(hidden[token] @ self.up[expert] + self.bias[expert])
                states = states @ self.down[expert] * self.scale[expert]
                result.index_add_(0, token, states * top_k_weights[token, slot, None])
        return result


class StackedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS), Stacked()

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(TOP_K)
        return x + self.experts(x, index, weights)


class TwoBlocks(nn.Module):
    """Two blocks in float64, the same on every rank; the caller writes to what they return."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(StackedBlock() for _ in range(2))
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

"""Blocks whose experts take hidden states of two and of three dims."""

import torch
from torch import nn

HIDDEN, WIDTH, TOP_K, EXPERTS = 6, 4, 3, 5


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


class Shaped(Stacked):
    """Takes hidden states of three dims."""

    def forward(self, hidden, top_k_index, top_k_weights):
        results = super().forward(hidden.reshape(-1, HIDDEN), top_k_index, top_k_weights)
        return results.view(hidden.shape)


class ShapedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS), Shaped()

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(TOP_K)
        return x + self.experts(x[None], index, weights)[0]


BLOCKS = {"stacked": StackedBlock, "shaped": ShapedBlock}

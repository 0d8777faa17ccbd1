"""Blocks whose experts are called, and lie, as in most models, and otherwise."""

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


class Sorted(nn.Module):
    """Takes rows one expert after another, and how many each has."""

    def __init__(self, into, out):
        super().__init__()
        self.num_experts = EXPERTS
        self.weight = nn.Parameter(torch.randn(EXPERTS, out, into))

    def forward(self, inputs, sizes):
        rows = inputs.split(sizes)
        return torch.cat([rows[e] @ self.weight[e].T for e in range(self.num_experts)])


class SortedBlock(nn.Module):
    """As JetMoE's: between its layers it knows nothing but rows sorted by expert."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.up, self.down = Sorted(HIDDEN, WIDTH), Sorted(WIDTH, HIDDEN)

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(TOP_K)
        order = index.flatten().sort(stable=True).indices
        sizes = index.flatten().bincount(minlength=EXPERTS).tolist()
        rows = self.down(self.up(x[order // TOP_K], sizes).tanh(), sizes)
        return x.index_add(0, order // TOP_K, rows * weights.flatten()[order, None])


class All(nn.Module):
    """Takes as many rows for each expert."""

    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))

    def forward(self, hidden):
        rows = hidden.view(len(self.up), -1, HIDDEN)
        return torch.bmm(torch.bmm(rows, self.up).tanh(), self.down).view(-1, HIDDEN)


class AllBlock(nn.Module):
    """As Llama 4's: scales the tokens for each expert, and most of them by nothing."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS), All()

    def forward(self, x):
        scores = self.router(x)
        best = scores.topk(TOP_K)
        scores = torch.full_like(scores, -torch.inf).scatter(1, best.indices, best.values).sigmoid()
        rows = x.repeat(EXPERTS, 1) * scores.T.reshape(-1, 1)
        return x + self.experts(rows).view(EXPERTS, -1, HIDDEN).sum(0)


class Rows(nn.Module):
    """Every expert has several rows of a matrix, and hidden states have three dims."""

    def __init__(self):
        super().__init__()
        self.ffn_size, self.num_experts = WIDTH, EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS * WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS * WIDTH, HIDDEN))

    def forward(self, hidden, top_k_index, top_k_weights):
        size, rows = len(hidden), hidden.reshape(-1, HIDDEN)
        up, down = (each.view(-1, WIDTH, HIDDEN) for each in (self.up, self.down))
        result = torch.zeros_like(rows)
        for expert in range(self.num_experts):
            token, slot = torch.where(top_k_index == expert)
            states = (rows[token] @ up[expert].T).tanh() @ down[expert]
            result.index_add_(0, token, states * top_k_weights[token, slot, None])
        return result.view(size, -1, HIDDEN)


class RowsBlock(nn.Module):
    """As DBRX's."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS), Rows()

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(TOP_K)
        return x + self.experts(x[None], index, weights)[0]


class Beyond(nn.Module):
    """Two experts more have no weights, though one of the stacks has rows for them."""

    def __init__(self):
        super().__init__()
        self.num_routed_experts, self.zero_expert_num = EXPERTS, 2
        self.total_experts = EXPERTS + 2
        self.up = nn.Parameter(torch.randn(EXPERTS + 2, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))

    def forward(self, hidden, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden)
        mask = nn.functional.one_hot(top_k_index, self.total_experts).permute(2, 1, 0)
        for expert in range(self.total_experts):
            slot, token = torch.where(mask[expert].squeeze(0))
            states = hidden[token]
            if expert < self.num_routed_experts:
                states = (states @ self.up[expert].T).tanh() @ self.down[expert].T
            result.index_add_(0, token, states * top_k_weights[token, slot, None])
        return result


class BeyondBlock(nn.Module):
    """As LongCat's."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS + 2), Beyond()

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(TOP_K)
        return x + self.experts(x, index, weights)


BLOCKS = {
    "stacked": StackedBlock,
    "sorted": SortedBlock,
    "all": AllBlock,
    "rows": RowsBlock,
    "beyond": BeyondBlock,
}

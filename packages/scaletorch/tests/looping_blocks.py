"""Blocks that loop over a bare list of experts, after the public patterns of several models."""

import torch
from torch import nn
from torch.nn.functional import one_hot, silu

HIDDEN, TOP_K = 6, 2


class Expert(nn.Module):
    def __init__(self, hidden=HIDDEN, inner=5):
        super().__init__()
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)

    def forward(self, x):
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Looping(nn.Module):
    """A router and experts; `skew` is added to the first expert's score."""

    def __init__(self, experts, hidden=HIDDEN, skew=0.0):
        super().__init__()
        self.num_experts, self.skew = experts, skew
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(Expert(hidden) for _ in range(experts))

    def scores(self, x):
        logits = self.gate(x)
        return logits + self.skew * (torch.arange(logits.shape[-1]) == 0).to(logits.dtype)


class Mixtral(Looping):
    """Calls every expert, also on no rows, and returns the router's logits too."""

    def forward(self, hidden_states):
        batch, length, width = hidden_states.shape
        hidden_states = hidden_states.view(-1, width)
        logits = self.scores(hidden_states)
        weights = logits.softmax(dim=1, dtype=torch.float64).to(hidden_states.dtype)
        weights, selected = torch.topk(weights, TOP_K, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        final = torch.zeros_like(hidden_states)
        mask = one_hot(selected, num_classes=self.num_experts).permute(2, 1, 0)
        for expert_idx in range(self.num_experts):
            expert_layer = self.experts[expert_idx]
            idx, top_x = torch.where(mask[expert_idx])
            state = hidden_states[None, top_x].reshape(-1, width)
            state = expert_layer(state) * weights[top_x, idx, None]
            final.index_add_(0, top_x, state.to(hidden_states.dtype))
        return final.reshape(batch, length, width), logits


class DeepSeek(Looping):
    """Sorts tokens by experts, leaves out those without, writes to results; has a shared expert."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.shared_experts = Expert(self.gate.in_features)

    def forward(self, x):
        shape, rows = x.shape, x.view(-1, x.shape[-1])
        weights, index = self.scores(rows).sigmoid().topk(TOP_K, dim=-1)
        counts = index.new_zeros((len(rows), self.num_experts)).scatter_(1, index, 1).sum(0)
        order = index.view(-1).argsort(stable=True)
        taken = rows[order // TOP_K]
        outputs, start = [], 0
        for i, number in enumerate(counts.tolist()):
            end = start + number
            if number == 0:
                continue
            outputs.append(self.experts[i](taken[start:end]).mul_(2))
            start = end
        outs = torch.cat(outputs) if outputs else taken.new_empty(0, shape[-1])
        found = torch.empty_like(outs)
        found[order] = outs
        found = found.view(*index.shape, shape[-1]).mul_(weights.unsqueeze(-1)).sum(1)
        return found.view(shape) + self.shared_experts(x)


class Skipping(Looping):
    """Takes weights before experts, so that the router's gradient goes through them too."""

    def forward(self, x):
        rows = x.flatten(0, -2)
        weights, index = self.scores(rows).softmax(-1).topk(TOP_K)
        out = rows
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            if len(token):
                scale = weights[token, slot, None]
                result = expert(rows[token] * scale) * (1 - scale)
                out = out.index_add(0, token, result.to(out.dtype))
        return out.view_as(x)


class Halving(Looping):
    """Calls experts from the last to the first, each on half of its tokens and then on the rest."""

    def forward(self, x):
        rows = x.flatten(0, -2)
        weights, index = self.scores(rows).softmax(-1).topk(TOP_K)
        out = torch.zeros_like(rows)
        for number in reversed(range(self.num_experts)):
            token, slot = torch.where(index == number)
            for part, place in zip(token.tensor_split(2), slot.tensor_split(2), strict=True):
                result = self.experts[number](rows[None, part]).squeeze(0)
                out = out.index_add(0, part, (result * weights[part, place, None]).to(out.dtype))
        return out.view_as(x)


class Named(Skipping):
    """Has a dict of experts, takes some of it by name, and loops over names and experts."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        named = {f"expert_{n}": expert for n, expert in enumerate(self.experts)}
        self.experts = nn.ModuleDict(named)

    def forward(self, x):
        rows = x.flatten(0, -2)
        weights, index = self.scores(rows).softmax(-1).topk(TOP_K)
        out = self.experts["expert_1"](rows)
        for number, (name, expert) in enumerate(self.experts.items()):
            token, slot = torch.where(index == number)
            if len(token) and name in self.experts:
                out = out.index_add(0, token, expert(rows[token]) * weights[token, slot, None])
        every = zip(self.experts, self.experts.values(), self.experts.keys(), strict=True)
        last = [expert for one, expert, other in every if one == other][len(self.experts) - 1]
        return (out + last(rows)).view_as(x)


BLOCKS = {"mixtral": Mixtral, "deepseek": DeepSeek, "skipping": Skipping, "halving": Halving,
          "named": Named}  # fmt: skip

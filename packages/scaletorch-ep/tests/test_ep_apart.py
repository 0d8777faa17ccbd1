"""Experts that cannot be apart are refused in their first call, on every rank; others are not."""

import copy

import pytest
import torch
import torch.distributed as c10d
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from scaletorch.dist import InvalidArgumentError, MismatchError
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.expert_parallel import apply_expert_parallel

HIDDEN, INNER, TOP_K = 6, 4, 2
WORLD = c10d.group.WORLD


class Stacked(nn.Module):
    """Sound: every expert's weights in its row, and a norm that all of them have in common."""

    def __init__(self, experts):
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, HIDDEN, INNER))
        self.down = nn.Parameter(torch.randn(experts, INNER, HIDDEN))
        self.scale = nn.Parameter(torch.randn(experts))
        self.norm = nn.LayerNorm(HIDDEN)
        self.register_buffer("calls", torch.zeros(()))

    def one(self, rows, expert):
        inner = F.dropout(self.norm(rows) @ self.up[expert], 0.5, self.training)
        return inner @ self.down[expert] * self.scale[expert]

    def forward(self, hidden, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden)
        self.calls += 1
        for expert in range(self.num_experts):
            token, slot = torch.where(top_k_index == expert)
            rows = self.one(hidden[token], expert) * top_k_weights[token, slot, None]
            out = out.index_add(0, token, rows)
        return out


class Normalising(Stacked):
    def forward(self, hidden, index, weights):
        return super().forward(hidden, index, weights / weights.sum(-1, keepdim=True))


class Capacity(Stacked):
    """Leaves out what goes beyond a fair share and a quarter."""

    def forward(self, hidden, index, weights):
        out, share = torch.zeros_like(hidden), 5 * index.numel() // (4 * self.num_experts)
        for expert in range(self.num_experts):
            token, slot = (each[:share] for each in torch.where(index == expert))
            rows = self.one(hidden[token], expert) * weights[token, slot, None]
            out = out.index_add(0, token, rows)
        return out


class Averaging(Stacked):
    def forward(self, hidden, index, weights):
        return super().forward(hidden, index, weights) / index.shape[1]


class Residual(Stacked):
    def forward(self, hidden, index, weights):
        return hidden + super().forward(hidden, index, weights)


class Centred(Stacked):
    def forward(self, hidden, index, weights):
        results = super().forward(hidden, index, weights)
        return results - results.mean(0)


class Neighbour(Stacked):
    def one(self, rows, expert):
        return super().one(rows, expert) + super().one(rows, expert - 1)


class Second(Stacked):
    """An expert a row of another dimension."""

    def __init__(self, experts):
        super().__init__(experts)
        self.up = nn.Parameter(torch.randn(HIDDEN, experts, INNER))

    def one(self, rows, expert):
        return self.norm(rows) @ self.up[:, expert] @ self.down[expert] * self.scale[expert]


class Packed(Second):
    """All experts in one matrix."""

    def __init__(self, experts):
        super().__init__(experts)
        self.up = nn.Parameter(torch.randn(HIDDEN, experts * INNER))

    def one(self, rows, expert):
        up = self.up.split(INNER, 1)[expert]
        return self.norm(rows) @ up @ self.down[expert] * self.scale[expert]


class Apart(Stacked):
    """A parameter an expert, in a list of another sort."""

    def __init__(self, experts):
        super().__init__(experts)
        del self.up
        self.up = nn.ParameterList(torch.randn(HIDDEN, INNER + 1) for _ in range(experts))
        self.down = nn.Parameter(torch.randn(experts, INNER + 1, HIDDEN))


class ByName(Stacked):
    """A module an expert, by names."""

    def __init__(self, experts):
        super().__init__(experts)
        self.up = self.down = None
        self.parts = nn.ModuleDict({str(e): nn.Linear(HIDDEN, HIDDEN) for e in range(experts)})

    def one(self, rows, expert):
        return self.parts[str(expert)](self.norm(rows)) * self.scale[expert]


class Plain(Stacked):
    """Sound, and draws nothing."""

    def one(self, rows, expert):
        return self.norm(rows) @ self.up[expert] @ self.down[expert] * self.scale[expert]


class Block(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, hidden, index, weights):
        return self.experts(hidden, index, weights)


def _call(kind, experts, again=False):
    """Return the results of a block's first call, its gradients and the plain block's results."""
    torch.manual_seed(1)
    plain = Block(kind(experts))
    block = apply_expert_parallel(copy.deepcopy(plain), {"experts": "experts"}, WORLD)
    hidden, weights = torch.randn(8, HIDDEN, requires_grad=True), torch.rand(8, TOP_K)
    index = torch.rand(8, experts).topk(TOP_K).indices
    before = torch.get_rng_state()
    if again:
        results = checkpoint(block, hidden, index, weights, use_reentrant=False)
    else:
        results = block(hidden, index, weights)
    results.sum().backward()
    return plain, block, (hidden.detach(), index, weights), results, before


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Normalising, "something else than the sum of what they return"),
        (Averaging, "something else than the sum of what they return"),
        (Residual, "something else than the sum of what they return"),
        (Capacity, "or with other tokens belongs into the block"),
        (Centred, "or with other tokens belongs into the block"),
        (Neighbour, "each takes more of 'up' than its own row"),
        (
            Second,
            r"single experts in 'up' \(6, 4, 4\), which stays whole.*stack it as \[4, \.\.\.\]",
        ),
        (Packed, r"single experts in 'up' \(6, 16\)"),
        (Apart, r"in a list \('experts\.up', a ParameterList\).*in parameters \[4, \.\.\.\]"),
        (ByName, r"in a list \('experts\.parts', a ModuleDict\)"),
    ],
)
@distributed_test(world_size=2)
def test_experts_that_need_one_another_are_refused(kind, message):
    with pytest.raises(InvalidArgumentError, match=message):
        _call(kind, 4)


@pytest.mark.parametrize("kind", [Apart, ByName])
@distributed_test(world_size=4)
def test_weights_apart_are_refused_with_one_expert_a_rank(kind):
    with pytest.raises(InvalidArgumentError, match="experts in a list are not divided"):
        _call(kind, 4)


@pytest.mark.parametrize("kind", [Second, Packed])
@distributed_test(world_size=4)
def test_weights_elsewhere_are_refused_with_one_expert_a_rank(kind):
    with pytest.raises((InvalidArgumentError, MismatchError), match="single experts in 'up'"):
        _call(kind, 4)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", [Stacked, Plain])
@distributed_test(world_size=2)
def test_nothing_tells_that_sound_experts_were_asked(kind, again):
    plain, block, given, results, before = _call(kind, 4, again)
    assert block.experts.training
    assert block.experts.calls <= 1 + again
    assert all(isinstance(each, nn.Parameter) for each in block.experts.parameters())
    assert all(each.grad is not None for each in block.experts.parameters())
    if kind is Plain:
        torch.testing.assert_close(results, plain(*given))
        assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(block.eval()(*given), plain.eval()(*given))

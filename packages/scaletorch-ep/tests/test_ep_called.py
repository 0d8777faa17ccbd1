"""Blocks train as in one process, and experts that are called otherwise are refused."""

from itertools import product

import pytest
import torch
import torch.distributed as c10d
from called_blocks import BLOCKS, EXPERTS, HIDDEN, Stacked
from torch import nn
from with_one_process import (
    TOKENS,
    TwoBlocks,
    gradients,
    random_tokens,
    whole_gradients,
)

from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.testing import relative_error, run_ranks, worst
from scaletorch.parallel.expert_parallel import (
    apply_expert_parallel,
    find_expert_cuts,
    gather_experts,
    own_experts,
)
from scaletorch.parallel.expert_parallel.building import find_experts

WORLD = c10d.group.WORLD


def Model(kind, skewed=False):
    model = TwoBlocks(BLOCKS[kind])
    for block in model.blocks if skewed else ():
        block.router.bias.data[:3] += 50  # experts of the first ranks alone get tokens
    return model


def _trained(kind, skewed):
    model, batch = Model(kind, skewed), random_tokens(TOKENS).requires_grad_()
    loss = model(batch).square().sum() / TOKENS
    loss.backward()
    return loss.detach(), batch.grad, gradients(model), model


def _divided(sizes, kind, skewed, recompute):
    """Return the worst difference of this rank's loss, gradients and state to one process's."""
    rank = c10d.get_rank()
    loss, of_batch, expected, plain = _trained(kind, skewed)
    model = apply_expert_parallel(Model(kind, skewed), None, WORLD)
    own = random_tokens(TOKENS).split(sizes)[rank].requires_grad_()
    mine = model(own, recompute).square().sum() / TOKENS
    mine.backward()
    rest = gradients(model).keys() - find_expert_cuts(model).keys()
    assert {name.partition(".router")[0] for name in rest} == {"blocks.0", "blocks.1"}
    whole, total = whole_gradients(model), mine.detach()
    c10d.all_reduce(total)
    state, before = gather_experts(model, model.state_dict()), plain.state_dict()
    assert state.keys() == before.keys() >= expected.keys()
    assert all(torch.equal(state[name], each) for name, each in before.items())
    mine_again = own_experts(model, before)
    assert all(torch.equal(mine_again[n], each) for n, each in model.state_dict().items())
    errors = [relative_error(total, loss), relative_error(own.grad, of_batch.split(sizes)[rank])]
    return worst([*errors, *(relative_error(whole[n], expected[n]) for n in expected)])


def _all_divided(sizes):
    cases = product(BLOCKS, (False, True), (False, True))
    return {case: _divided(sizes, *case) for case in cases}


@pytest.mark.parametrize("sizes", [(7, 3), (4, 0, 6), (3, 3, 3, 1)])
def test_as_one_process(sizes):
    for errors in run_ranks(_all_divided, len(sizes), sizes, timeout=200):
        for case, error in errors.items():
            assert error <= 1e-12, case


def _shared(tp_group, alone, kind, tokens, divided):
    """Two tp ranks hold the same tokens, over all ranks divided experts or whole ones."""
    rank, plain, group = c10d.get_rank(), Model(kind), WORLD if divided else alone
    model = apply_expert_parallel(Model(kind), None, group, tp_group=tp_group)
    whole = random_tokens(2, tokens, seed=8).requires_grad_()
    for part in whole:
        plain(part).square().sum().backward()
    own = whole.detach()[rank // 2].clone().requires_grad_()
    model(own).square().sum().backward()
    cuts, found = find_expert_cuts(model), gradients(model)
    for name, gradient in found.items():
        if name not in cuts or not divided:
            c10d.all_reduce(gradient)
        if name not in cuts:
            gradient /= 2  # each tp rank has the whole of its tokens
    gathered, expected = gather_experts(model, found), gradients(plain)
    errors = [relative_error(own.grad, whole.grad[rank // 2])]
    return worst([*errors, *(relative_error(gathered[n], expected[n]) for n in expected)])


def _all_shared():
    tp_group = [c10d.new_group([0, 1]), c10d.new_group([2, 3])][c10d.get_rank() // 2]
    alone = c10d.new_group([c10d.get_rank()], use_local_synchronization=True)
    cases = [*product(BLOCKS, (7,), (True, False)), ("stacked", 5, True), ("stacked", 1, True)]
    return {case: _shared(tp_group, alone, *case) for case in cases}


def test_tokens_that_tp_ranks_share():
    for errors in run_ranks(_all_shared, 4, timeout=200):
        for case, error in errors.items():
            assert error <= 1e-12, case


class Sorted(Stacked):
    """Takes rows one expert after another, and how many each has."""

    def forward(self, inputs, sizes):
        return inputs


class All(Stacked):
    """Takes the same number of rows for each expert, as Llama 4's."""

    def forward(self, rows):
        return rows


@pytest.mark.parametrize("kind", [Sorted, All])
def test_experts_that_are_called_otherwise_are_refused(kind):
    with pytest.raises(InvalidArgumentError, match=f"{kind.__name__}.* is called as .*, not as"):
        find_experts("experts", kind())


class Rows(nn.Module):
    """Has several rows of each matrix for an expert, as DBRX."""

    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS * 2, HIDDEN))

    def forward(self, hidden, top_k_index, top_k_weights):
        return hidden


class Beyond(Stacked):
    """Counts experts without weights, as LongCat-Flash."""

    def __init__(self):
        super().__init__()
        self.total_experts = EXPERTS + 2
        self.bias = nn.Parameter(torch.randn(EXPERTS + 2, HIDDEN))


@pytest.mark.parametrize(("kind", "words"), [(Rows, "is unknown"), (Beyond, r"is one of \[5, 7\]")])
def test_experts_that_have_not_a_row_each_are_refused(kind, words):
    with pytest.raises(InvalidArgumentError, match=words):
        find_experts("experts", kind())

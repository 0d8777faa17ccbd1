"""Models with divided experts train as in one process, also on ranks that receive no rows."""

import copy
import pickle
from itertools import product

import pytest
import torch
import torch.distributed as c10d
from called_blocks import (
    HIDDEN,
    TOKENS,
    TOP_K,
    TwoBlocks,
    gradients,
    random_tokens,
    whole_gradients,
)

from scaletorch.dist import StateError
from scaletorch.dist.testing import distributed_test, relative_error, run_ranks, worst
from scaletorch.parallel.expert_parallel import (
    apply_expert_parallel,
    find_expert_cuts,
    gather_experts,
    own_experts,
)
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

WORLD = c10d.group.WORLD


def Model(skewed=False, frozen="nothing"):
    model = TwoBlocks()
    for block in model.blocks:
        block.router.requires_grad_(frozen == "nothing")
        if skewed:
            block.router.bias.data[:3] += 50  # experts of the first ranks alone get tokens
    return model


def _divided(sizes, skewed, recompute, frozen="nothing"):
    """Return the worst difference of this rank's loss, gradients and state to one process's."""
    rank, plain = c10d.get_rank(), Model(skewed, frozen)
    batch = random_tokens(TOKENS).requires_grad_(frozen != "all")
    loss = plain(batch).square().sum() / TOKENS
    loss.backward()
    expected = gradients(plain)
    model = apply_expert_parallel(Model(skewed, frozen), None, WORLD)
    own = random_tokens(TOKENS).split(sizes)[rank].requires_grad_(frozen != "all")
    mine = model(own, recompute).square().sum() / TOKENS
    mine.backward()
    assert all(p.grad is not None for b in model.blocks for p in b.experts.parameters())
    rest = gradients(model).keys() - find_expert_cuts(model).keys()
    assert {name.partition(".router")[0] for name in rest} == {"blocks.0", "blocks.1"}
    whole, total = whole_gradients(model), mine.detach()
    c10d.all_reduce(total)
    state, before = gather_experts(model, model.state_dict()), plain.state_dict()
    assert state.keys() == before.keys() >= expected.keys()
    assert all(torch.equal(state[name], each) for name, each in before.items())
    mine_again = own_experts(model, before)
    assert all(torch.equal(mine_again[n], each) for n, each in model.state_dict().items())
    errors = [relative_error(total, loss.detach())]
    if frozen != "all":
        errors.append(relative_error(own.grad, batch.grad.split(sizes)[rank]))
    return worst([*errors, *(relative_error(whole[n], expected[n]) for n in expected)])


def _all_divided(sizes):
    cases = [*product((False, True), (False, True))]
    cases += product([True], (False, True), ("router", "all"))
    return {case: _divided(sizes, *case) for case in cases}


@pytest.mark.parametrize("sizes", [(7, 3), (4, 0, 6), (3, 3, 3, 1)])
def test_as_one_process(sizes):
    for errors in run_ranks(_all_divided, len(sizes), sizes, timeout=200):
        for case, error in errors.items():
            assert error <= 1e-12, case


def _shared(tp_group, alone, tokens, divided):
    """Two tp ranks hold the same tokens, over all ranks divided experts or whole ones."""
    rank, plain, group = c10d.get_rank(), Model(), WORLD if divided else alone
    model = apply_expert_parallel(Model(), None, group, tp_group=tp_group)
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
    cases = [(7, True), (7, False), (5, True), (1, True)]
    return {case: _shared(tp_group, alone, *case) for case in cases}


def test_tokens_that_tp_ranks_share():
    for errors in run_ranks(_all_shared, 4, timeout=200):
        for case, error in errors.items():
            assert error <= 1e-12, case


PLAN = {"blocks.*.experts": "experts"}


@distributed_test(world_size=2)
def test_what_becomes_of_a_model():
    torch.manual_seed(0)
    model = Model()
    model.blocks[1].experts.up = model.blocks[0].experts.up  # tied
    model.blocks[0].experts.down.requires_grad_(False)
    whole = {name: each.clone() for name, each in model.state_dict().items()}
    kind, experts = type(model.blocks[0].experts), model.blocks[0].experts
    apply_expert_parallel(model, PLAN, WORLD)
    assert model.blocks[0].experts is experts
    assert isinstance(experts, kind)
    assert type(experts).__name__ == kind.__name__
    assert experts.num_experts == (3, 2)[c10d.get_rank()]
    assert experts.num_experts_per_tok == TOP_K
    assert experts.up is model.blocks[1].experts.up
    assert not experts.down.requires_grad
    assert model.state_dict().keys() == whole.keys()
    own = own_experts(model, whole)
    assert all(torch.equal(own[name], each) for name, each in model.state_dict().items())
    cut = find_expert_cuts(model)["blocks.0.experts.scale"]
    assert (cut.whole, cut.ranges) == (5, (range(3), range(3, 5)))
    assert cut.group is WORLD
    twin, x = copy.deepcopy(model), random_tokens(TOKENS)
    assert torch.equal(twin(x), model(x))
    assert twin.blocks[0].experts.up is not experts.up
    with pytest.raises(StateError, match="cannot be pickled"):
        pickle.dumps(model)


@distributed_test(world_size=2)
def test_gathering_refuses_what_does_not_fit():
    model = apply_expert_parallel(Model(), PLAN, WORLD)
    name = "blocks.0.experts.up"
    with pytest.raises(ValueError, match="the model has no 'up'"):
        gather_experts(model, {"up": torch.ones(1)})
    with pytest.raises(ValueError, match="this rank's experts have"):
        gather_experts(model, {name: torch.ones(5, HIDDEN, 4)})
    with pytest.raises(RuntimeError, match="disagree on the tensors of experts"):
        gather_experts(model, model.state_dict() if c10d.get_rank() else {})
    with pytest.raises(ValueError, match="the whole has 5 rows of experts"):
        own_experts(model, model.state_dict())


def _by_default(sizes, sequence_parallel):
    """The manager's axes, where no group is given: who has experts, and who the same tokens."""
    manager = setup_process_group_manager(**sizes)
    try:
        model = apply_expert_parallel(Model(), PLAN, sequence_parallel=sequence_parallel)
        division = model.blocks[0].experts._division
        assert division.group is manager.ep_group
        share = manager.etp_size == 1 and manager.tp_size > 1
        same = share and not sequence_parallel
        assert division.tokens is (manager.tp_group if same else None)
    finally:
        destroy_process_group_manager()


DEFAULTS = [
    ({"dp_size": 4, "ep_size": 4}, False),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 4}, False),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 2}, True),
    ({"dp_size": 2, "tp_size": 2, "etp_size": 1}, False),
    ({"dp_size": 2, "tp_size": 2, "etp_size": 1}, True),
]


@distributed_test(world_size=4)
def test_without_groups_the_managers_axes_are_meant():
    for each in DEFAULTS:
        _by_default(*each)

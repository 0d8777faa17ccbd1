"""Models with divided experts, and ranks that receive no rows."""

import copy
import pickle
from itertools import product

import pytest
import torch
import torch.distributed as c10d
from called_blocks import TOP_K, StackedBlock
from torch.utils.checkpoint import checkpoint
from with_one_process import (
    HIDDEN,
    TOKENS,
    TwoBlocks,
    gradients,
    random_tokens,
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


def Model():
    return TwoBlocks(StackedBlock)


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


def _idle(recompute, frozen):
    """No token chooses an expert of the last rank, which has no rows to compute."""
    rank, sizes = c10d.get_rank(), (4, 3, 3)

    def build():
        torch.manual_seed(4)
        block = StackedBlock().double()
        with torch.no_grad():
            block.router.bias[:3] += 50
        block.router.requires_grad_(frozen == "nothing")
        return block

    plain, block = build(), apply_expert_parallel(build(), {"experts": "experts"}, WORLD)
    whole, own = random_tokens(TOKENS), random_tokens(TOKENS).split(sizes)[rank].clone()
    for batch in (whole, own):
        batch.requires_grad_(frozen != "all")
    plain(whole).square().sum().backward()
    out = checkpoint(block, own, use_reentrant=False) if recompute else block(own)
    out.square().sum().backward()
    expected, found = gradients(plain), gradients(block)
    for name in ("router.weight", "router.bias") if frozen == "nothing" else ():
        c10d.all_reduce(found[name])
    assert all(p.grad is not None for p in block.experts.parameters())
    gathered = gather_experts(block, found)
    errors = [relative_error(gathered[n], expected[n]) for n in expected]
    if frozen != "all":
        errors.append(relative_error(own.grad, whole.grad.split(sizes)[rank]))
    return worst(errors)


def _all_idle():
    cases = product((False, True), ("nothing", "router", "all"))
    return {case: _idle(*case) for case in cases}


def test_a_rank_that_gets_no_rows_takes_part():
    for errors in run_ranks(_all_idle, 3, timeout=60):
        for case, error in errors.items():
            assert error <= 1e-12, case


def _by_default(sizes, sequence_parallel):
    """The manager's axes, where no group is given: who has experts, and who the same tokens."""
    manager = setup_process_group_manager(**sizes)
    try:
        plain, rank = Model(), c10d.get_rank()
        model = apply_expert_parallel(Model(), PLAN, sequence_parallel=sequence_parallel)
        division = model.blocks[0].experts._division
        assert division.group is manager.ep_group
        share = manager.etp_size == 1 and manager.tp_size > 1
        same = share and not sequence_parallel
        assert division.tokens is (manager.tp_group if same else None)
        number = manager.dp_rank if same else rank
        batch = random_tokens(4, TOKENS, seed=8)
        plain(batch.flatten(0, 1)[: TOKENS * (2 if same else 4)]).square().sum().backward()
        model(batch[number]).square().sum().backward()
        found = gradients(model)
        for name in find_expert_cuts(model):
            if name in found:
                c10d.all_reduce(found[name], group=manager.edp_group)
        whole = gather_experts(model, {n: found[n] for n in find_expert_cuts(model) if n in found})
        return worst([relative_error(g, plain.get_parameter(n).grad) for n, g in whole.items()])
    finally:
        destroy_process_group_manager()


DEFAULTS = [
    ({"dp_size": 4, "ep_size": 4}, False),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 4}, False),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 2}, True),
    ({"dp_size": 2, "tp_size": 2, "etp_size": 1}, False),
    ({"dp_size": 2, "tp_size": 2, "etp_size": 1}, True),
]


def _all_by_default():
    return [_by_default(*each) for each in DEFAULTS]


def test_without_groups_the_managers_axes_are_meant():
    for errors in run_ranks(_all_by_default, 4):
        assert max(errors) <= 1e-12, errors

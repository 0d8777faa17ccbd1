"""Whole models whose experts are divided: training, state, and what is refused."""

import copy
import pickle

import pytest
import torch
import torch.distributed as c10d
from torch import nn
from torch.utils.checkpoint import checkpoint
from with_one_process import (
    HIDDEN,
    TOKENS,
    TwoBlocks,
    gradients,
    random_tokens,
    tp_pair,
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

TOP_K = 3
WORLD = c10d.group.WORLD


class Stacked(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.num_experts, self.num_experts_per_tok = experts, TOP_K
        self.up = nn.Parameter(torch.randn(experts, HIDDEN, 4))
        self.bias = nn.Parameter(torch.randn(experts, 4))
        self.down = nn.Parameter(torch.randn(experts, 4, HIDDEN))
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


class Block(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.router = nn.Linear(HIDDEN, experts)
        self.experts = Stacked(experts)

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(TOP_K)
        return x + self.experts(x, index, weights)


def Model(experts=5):
    return TwoBlocks(lambda: Block(experts))


PLAN = {"blocks.*.experts": "experts"}


def _trained():
    model, batch = Model(), random_tokens(TOKENS).requires_grad_()
    loss = model(batch).square().sum() / TOKENS
    loss.backward()
    return loss.detach(), batch.grad, {n: p.grad for n, p in model.named_parameters()}, model


def _divided(sizes, recompute):
    """Return the worst difference of this rank's loss, gradients and state to one process's."""
    rank = c10d.get_rank()
    loss, of_batch, gradients, plain = _trained()
    model = apply_expert_parallel(Model(), PLAN, WORLD)
    own = random_tokens(TOKENS).split(sizes)[rank].requires_grad_()
    mine = model(own, recompute).square().sum() / TOKENS
    mine.backward()
    whole = whole_gradients(model)
    assert whole.keys() == gradients.keys()
    state = gather_experts(model, model.state_dict())
    assert state.keys() == plain.state_dict().keys()
    assert all(torch.equal(state[n], each) for n, each in plain.state_dict().items())
    total = mine.detach()
    c10d.all_reduce(total)
    errors = [relative_error(total, loss), relative_error(own.grad, of_batch.split(sizes)[rank])]
    return worst([*errors, *(relative_error(whole[n], gradients[n]) for n in gradients)])


@pytest.mark.parametrize("sizes", [(7, 3), (4, 0, 6), (3, 3, 3, 1)])
def test_they_train_as_in_one_process(sizes):
    for recompute in (False, True):
        assert max(run_ranks(_divided, len(sizes), sizes, recompute)) <= 1e-12


def _shared(tokens):
    """Two tp ranks hold the same tokens; the experts are divided over all four ranks."""
    rank = c10d.get_rank()
    tp_group, batch = tp_pair(), random_tokens(2, tokens, seed=8)
    plain, model = Model(), apply_expert_parallel(Model(), PLAN, WORLD, tp_group=tp_group)
    whole = batch.requires_grad_()
    plain(whole.flatten(0, 1)).square().sum().backward()
    own = batch.detach()[rank // 2].clone().requires_grad_()
    model(own).square().sum().backward()
    expected, gathered = gradients(plain), whole_gradients(model, sharing=2)
    errors = [relative_error(own.grad, whole.grad[rank // 2])]
    errors += [relative_error(gathered[n], expected[n]) for n in expected]
    c10d.destroy_process_group(tp_group)
    return worst(errors)


@pytest.mark.parametrize("tokens", [5, 1])
def test_ranks_that_hold_the_same_tokens_send_a_share_each(tokens):
    assert max(run_ranks(_shared, 4, tokens)) <= 1e-12


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
        block = Block(5).double()
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


@pytest.mark.parametrize("frozen", ["nothing", "router", "all"])
def test_a_rank_that_gets_no_rows_takes_part(frozen):
    for recompute in (False, True):
        assert max(run_ranks(_idle, 3, recompute, frozen, timeout=20)) <= 1e-12


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


@pytest.mark.parametrize(("sizes", "sequence_parallel"), DEFAULTS)
def test_without_groups_the_managers_axes_are_meant(sizes, sequence_parallel):
    assert max(run_ranks(_by_default, 4, sizes, sequence_parallel)) <= 1e-12

"""Experts in a bare list that its block loops over: the block's own code, on every layout."""

import copy
import pickle
import random

import pytest
import torch
import torch.distributed as c10d
from looping_blocks import BLOCKS, HIDDEN, Expert, model_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from with_one_process import (
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
    gather_experts,
    own_experts,
)

WORLD = c10d.group.WORLD
PLAN = {"blocks.*.experts": "experts"}
EXPERTS = 5


def Model(kind, skew=0.0):
    return TwoBlocks(lambda: BLOCKS[kind](EXPERTS, skew=skew))


def trained(kind, sizes, skew, recompute):
    """Return the worst difference of this rank's output, gradients and state to one process's."""
    rank = c10d.get_rank()
    plain, whole = Model(kind, skew), random_tokens(1, TOKENS).requires_grad_()
    expected = plain(whole)
    expected.square().sum().backward()
    model = apply_expert_parallel(Model(kind, skew), PLAN, WORLD)
    own = random_tokens(1, TOKENS).split(sizes, 1)[rank].requires_grad_()
    found = model(own, recompute)
    found.square().sum().backward()
    errors = [relative_error(found, expected.split(sizes, 1)[rank])]
    errors.append(relative_error(own.grad, whole.grad.split(sizes, 1)[rank]))
    together = whole_gradients(model)
    assert together.keys() == gradients(plain).keys()
    return worst([*errors, *(relative_error(together[n], g) for n, g in gradients(plain).items())])


@pytest.mark.parametrize("skew", [0.0, 60.0])
@pytest.mark.parametrize("sizes", [(7, 3), (4, 0, 6), (3, 3, 3, 1)])
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_compute_what_one_process_does(kind, sizes, skew):
    for recompute in (False, True):
        assert max(run_ranks(trained, len(sizes), kind, sizes, skew, recompute)) <= 1e-12


def shared_tokens(kind, tokens):
    """Two tp ranks hold the same tokens; the experts are divided over all four ranks."""
    rank = c10d.get_rank()
    tp_group, whole = tp_pair(), random_tokens(2, tokens, seed=8)
    plain, inputs = Model(kind), whole.clone().requires_grad_()
    expected = plain(inputs)
    expected.square().sum().backward()
    own = whole[rank // 2 : rank // 2 + 1].clone().requires_grad_()
    model = apply_expert_parallel(Model(kind), PLAN, WORLD, tp_group=tp_group)
    found = model(own)
    found.square().sum().backward()
    errors = [relative_error(found[0], expected[rank // 2])]
    errors.append(relative_error(own.grad[0], inputs.grad[rank // 2]))
    together = whole_gradients(model, sharing=2)
    c10d.destroy_process_group(tp_group)
    return worst([*errors, *(relative_error(together[n], g) for n, g in gradients(plain).items())])


@pytest.mark.parametrize("tokens", [5, 1])
@pytest.mark.parametrize("kind", BLOCKS)
def test_ranks_that_hold_the_same_tokens_send_a_share_each(kind, tokens):
    assert max(run_ranks(shared_tokens, 4, kind, tokens)) <= 1e-12


@pytest.mark.parametrize("kind", ["mixtral", "named"])
@distributed_test(world_size=2)
def test_what_becomes_of_a_model(kind):
    plain, model = Model(kind), apply_expert_parallel(Model(kind), PLAN, WORLD)
    block, rank = model.blocks[0], c10d.get_rank()
    assert isinstance(block, BLOCKS[kind])
    assert type(block).__name__ == kind.capitalize()
    assert block.num_experts == EXPERTS
    state = gather_experts(model, model.state_dict())
    assert state.keys() == plain.state_dict().keys()
    assert all(torch.equal(state[name], each) for name, each in plain.state_dict().items())
    own = own_experts(model, plain.state_dict())
    assert own.keys() == model.state_dict().keys()
    names = {n.split(".")[3] for n in own if n.startswith("blocks.0.experts.")}
    assert {int(name[-1]) for name in names} == ({0, 1, 2}, {3, 4})[rank]
    model.load_state_dict(own)
    assert len(block.experts) == len([*block.experts]) == (3, 2)[rank]
    x = random_tokens(1, TOKENS)
    twin, expected = copy.deepcopy(model), plain(x)
    for each in (model, twin):
        assert relative_error(each(x), expected) < 1e-12
    first = next(iter(names))
    (one, other) = (each.blocks[0].experts.get_submodule(first) for each in (twin, model))
    assert one.w1.weight is not other.w1.weight
    with pytest.raises(StateError, match="cannot be pickled"):
        pickle.dumps(model)


class Writing(BLOCKS["deepseek"]):
    """Counts in buffers and attributes, writes to its input, and draws."""

    def __init__(self, experts):
        super().__init__(experts)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("load", torch.zeros(1))
        self.seen, self.names, self.number, self.total = [], {"all": []}, 0, torch.zeros(())

    def forward(self, x):
        self.calls += 1
        self.load = self.load + len(x)
        self.seen.append(len(x))
        self.names["all"].append(self.number)
        self.number += 1
        self.total.add_(1)
        x *= torch.rand(x.shape, dtype=x.dtype) + random.random()
        return super().forward(x)


@distributed_test(world_size=2)
def test_what_a_forward_writes_and_draws_it_does_once():
    found = []
    for divided in (False, True):
        torch.manual_seed(1)
        block = Writing(4).double()
        if divided:
            apply_expert_parallel(block, {"experts": "experts"}, WORLD)
        x = random_tokens(1, TOKENS)
        torch.manual_seed(9)
        random.seed(9)
        first, second = block(x), block(x)
        found.append((first, second, x, torch.rand(2), random.random()))
        assert (block.calls, block.load, block.total) == (2, 2, 2)
        assert (block.seen, block.names, block.number) == ([1, 1], {"all": [0, 1]}, 2)
    for one, other in zip(*found, strict=True):
        assert torch.allclose(torch.as_tensor(one), torch.as_tensor(other), rtol=1e-12, atol=0)


@distributed_test(world_size=2)
def test_experts_that_drop_draw_other_numbers_than_the_block_behind_them():
    block = apply_expert_parallel(BLOCKS["mixtral"](4), {"experts": "experts"}, WORLD)
    drawn = []
    for expert in block.experts:
        expert.register_forward_hook(lambda *_: drawn.append(torch.rand(1).item()))
    block(random_tokens(1, TOKENS).float())
    assert torch.rand(1).item() not in drawn
    assert len({*drawn}) == len(drawn) == 2


@pytest.mark.parametrize("kind", BLOCKS)
@distributed_test(world_size=2)
def test_without_gradients_and_in_16_bits(kind):
    block, x = BLOCKS[kind](4).double(), random_tokens(1, TOKENS)
    plain = copy.deepcopy(block)
    apply_expert_parallel(block, {"experts": "experts"}, WORLD)

    def hidden(of, given):
        out = of(given)
        return out[0] if isinstance(out, tuple) else out

    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = hidden(block.eval(), x)
            assert not out.requires_grad
            assert relative_error(out, hidden(plain, x)) < 1e-12
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        same = hidden(block.to(dtype), x.to(dtype)), hidden(plain.to(dtype), x.to(dtype))
        assert torch.allclose(*same, rtol=1e-2, atol=1e-2)
        assert same[0].dtype == dtype


@pytest.mark.parametrize("kind", BLOCKS)
@distributed_test(world_size=2)
def test_under_autocast(kind):
    """Results of experts are in bfloat16, and what the block makes of them as in one process."""
    block, x = BLOCKS[kind](4), random_tokens(1, TOKENS).float()
    plain = copy.deepcopy(block)
    apply_expert_parallel(block, {"experts": "experts"}, WORLD)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = block(x), plain(x)
    if kind == "mixtral":
        found, expected = found[0], expected[0]
    assert found.dtype == expected.dtype
    assert relative_error(found, expected) < 1e-2
    (found.sum() / 2).backward()
    expected.sum().backward()
    for name, parameter in block.named_parameters():
        gradient = plain.get_parameter(name).grad
        if gradient is not None and name.startswith("experts."):
            assert relative_error(parameter.grad, gradient) < 2e-2, name


class Blind(BLOCKS["skipping"]):
    """Uses no result where its rank is not the first."""

    def forward(self, x):
        out = super().forward(x)
        return out if c10d.get_rank() == 0 else x * 2


@distributed_test(world_size=2)
def test_a_rank_that_drops_its_results_takes_part():
    torch.manual_seed(0)
    block = apply_expert_parallel(Blind(4), {"experts": "experts"}, WORLD)
    for x in (random_tokens(1, TOKENS).float(), random_tokens(1, TOKENS).float().requires_grad_()):
        for recompute in (False, True):
            out = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
            out.sum().backward()


@distributed_test(world_size=2)
def test_nobody_asks_anything():
    block = apply_expert_parallel(BLOCKS["skipping"](4), {"experts": "experts"}, WORLD)
    x = torch.ones(1, 0, HIDDEN, requires_grad=True)
    block(x).sum().backward()
    assert all(p.grad is None for p in block.experts.parameters())


class Picky(Expert):
    """Cannot be called on no rows."""

    def forward(self, x):
        return super().forward(x) + 0 * x.max()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@distributed_test(world_size=2)
def test_experts_that_nobody_asks_are_not_called(dtype):
    torch.manual_seed(0)
    model = model_of(lambda block, x: block.experts[0](x))
    model["block"].experts = nn.ModuleList(Picky() for _ in range(4))
    plain = copy.deepcopy(model)
    apply_expert_parallel(model, {"block.experts": "experts"}, WORLD)
    x = random_tokens(1, TOKENS).float()
    for _ in range(2):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            found, expected = model["block"](x), plain["block"](x)
        assert found.dtype == expected.dtype
        assert relative_error(found, expected) < (1e-6 if dtype is None else 1e-2)


class Hidden:
    """Tensors that nobody finds."""

    def __init__(self, hidden):
        self.hidden = hidden


class Hiding(BLOCKS["skipping"]):
    def forward(self, x):
        return Hidden(super().forward(x))


@distributed_test(world_size=2)
def test_recomputation_of_a_block_whose_results_are_in_an_object_of_its_own():
    block = Hiding(4).double()
    plain = copy.deepcopy(block)
    apply_expert_parallel(block, {"experts": "experts"}, WORLD)
    x = random_tokens(1, TOKENS)
    checkpoint(block, x, use_reentrant=False).hidden.square().sum().backward()
    plain(x).hidden.square().sum().backward()
    for name, parameter in block.named_parameters():
        expected = plain.get_parameter(name).grad
        if expected is not None and expected.any():
            scale = 1 if name.startswith("gate") else 2  # tokens of both ranks
            assert relative_error(parameter.grad, scale * expected) < 1e-12, name


@pytest.mark.parametrize("kind", BLOCKS)
@distributed_test(world_size=2)
def test_experts_called_on_no_rows_have_zeros_and_others_nothing(kind):
    """One token has two experts; some blocks call the others, too."""
    torch.manual_seed(4)
    block = BLOCKS[kind](EXPERTS, skew=60.0).double()
    plain = copy.deepcopy(block)
    apply_expert_parallel(block, {"experts": "experts"}, WORLD)
    for each in (block, plain):
        out = each(random_tokens(1, 1))
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    idle = {name for name, each in plain.named_parameters() if each.grad is None}
    assert bool(idle) == (kind in ("deepseek", "skipping", "named"))
    for name, parameter in block.named_parameters():
        assert (parameter.grad is None) == (name in idle), name

"""Errors of users' own code in looped blocks and in experts: all ranks hear of them at once."""

import pytest
import torch
import torch.distributed as c10d
from looping_blocks import HIDDEN, asks_well, model_of
from torch import nn

from scaletorch.dist import MismatchError
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.expert_parallel import apply_expert_parallel

WORLD = c10d.group.WORLD
PLAN = {"block.experts": "experts"}


class OwnError(Exception):
    """Of no kind that this library knows."""


def _asking_fails(block, x):
    raise OwnError("of rows 0 to 2")


def _results_fail(block, x):
    if block.experts[3](x).any():
        raise OwnError("of rows 0 to 2")
    return x


def _no_width(block, x):
    return block.experts[0](x[:, :0])


def _expert_fails(block, x):
    return block.experts[2](x * torch.inf)


def _raise_where_infinite(expert, args):
    if args[0].isinf().any():
        raise OwnError("of rows 0 to 2")


OWN = {
    _asking_fails: (OwnError, "of rows 0 to 2"),
    _results_fail: (OwnError, "of rows 0 to 2"),
    _no_width: (RuntimeError, "of 0 elements"),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("tp", [False, True])
@pytest.mark.parametrize("ask", OWN, ids=lambda ask: ask.__name__)
@distributed_test(world_size=3)
def test_what_a_block_raises_on_one_rank_is_heard_on_all(ask, tp, first):
    (kind, message), rank = OWN[ask], c10d.get_rank()
    model = apply_expert_parallel(model_of(asks_well), PLAN, WORLD, tp_group=WORLD if tp else None)
    block = model["block"]
    if not first:
        block(torch.ones(3, HIDDEN))
    block.ask = ask if rank == 1 else asks_well if not tp else lambda _, x: block.experts[3](x)
    told = rf"rank 1 cannot take part in .*block\.experts.*: (.|\n)*{message}"
    expected, words = (kind, message) if rank == 1 else (MismatchError, told)
    with pytest.raises(expected, match=words):
        block(torch.ones(3, HIDDEN))
    block.ask = asks_well
    block(torch.ones(3, HIDDEN)).sum().backward()


@pytest.mark.parametrize("first", [True, False])
@distributed_test(world_size=3)
def test_what_an_expert_raises_is_heard_on_all(first):
    """Rank 0 asks; expert 2, which rank 1 has, fails, and rank 2 has nothing to do with it."""
    model, rank = apply_expert_parallel(model_of(asks_well), PLAN, WORLD), c10d.get_rank()
    block = model["block"]
    if not first:
        block(torch.ones(3, HIDDEN))
    for expert in block.experts:
        expert.register_forward_pre_hook(_raise_where_infinite)
    block.ask = _expert_fails if rank == 0 else asks_well
    told = r"rank 1 cannot take part in .*block\.experts.*: OwnError: of rows 0 to 2"
    expected, words = (OwnError, "of rows 0 to 2") if rank == 1 else (MismatchError, told)
    with pytest.raises(expected, match=words):
        block(torch.ones(3, HIDDEN))
    block.ask = asks_well
    block(torch.ones(3, HIDDEN)).sum().backward()


class Stacked(nn.Module):
    """Four experts, which fail on numbers beyond all bounds."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.weight = 4, nn.Parameter(torch.ones(4, HIDDEN))

    def forward(self, hidden, top_k_index, top_k_weights):
        _raise_where_infinite(self, (hidden,))
        return hidden * self.weight[top_k_index[:, 0]] * top_k_weights


@pytest.mark.parametrize("first", [True, False])
@distributed_test(world_size=2)
def test_what_a_module_of_experts_raises_is_heard_on_all(first):
    rank, experts = c10d.get_rank(), nn.ModuleDict({"experts": Stacked()})
    experts = apply_expert_parallel(experts, {"experts": "experts"}, WORLD)["experts"]
    rows, to = torch.ones(2, HIDDEN), torch.tensor([[0], [3 * rank]])  # of rank 0 none leaves
    if not first:
        experts(rows, to, torch.ones(2, 1))
    told = r"rank 1 cannot take part in .*the experts 'experts': OwnError: of rows 0 to 2"
    expected, words = (OwnError, "of rows 0 to 2") if rank == 1 else (MismatchError, told)
    for _ in range(2):
        with pytest.raises(expected, match=words):
            experts(
                torch.tensor([[1.0], [torch.inf if rank else 1.0]]) * rows, to, torch.ones(2, 1)
            )
    assert torch.equal(experts(rows, to, torch.ones(2, 1)), rows)

"""Layers that take one input enter the parallel region once, with the gradient of one process."""

import copy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.tensor_parallel import apply_tensor_parallel

PLAN = {"up": "column", "gate": "column", "down": "row"}


class Gated(nn.Module):
    def __init__(self, inplace=False):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)
        self.inplace = inplace

    def forward(self, x):
        up = self.up(x)
        if self.inplace:
            x = x.clone()
            gate = self.gate(x)
            return self.down(up * torch.sigmoid(gate))
        return self.down(up * torch.sigmoid(self.gate(x)))


def count_sums(run):
    """Return what `run` does, and how many tensors it sums over ranks."""
    own, sums = dist.all_reduce, []

    def counted(x, *args):
        sums.append(tuple(x.shape))
        return own(x, *args)

    with patch.object(dist, "all_reduce", counted):
        return run(), len(sums)


def backward(how, reentrant=False):
    """Return the input's gradient, in one process and here, and the number of sums."""
    torch.manual_seed(0)
    plain = Gated(how == "inplace").double()
    x = torch.randn(3, 6, dtype=torch.float64)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain(theirs).square().sum().backward()
    model = apply_tensor_parallel(copy.deepcopy(plain), PLAN, dist.group.WORLD)
    if how == "deepcopy":
        model = copy.deepcopy(model)

    def run():
        if how == "checkpoint":
            out = checkpoint(model, mine, use_reentrant=reentrant)
        else:
            out = model(mine)
        out.square().sum().backward()

    _, sums = count_sums(run)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    gradient = plain.up.weight.grad.tensor_split(2)[dist.get_rank()]
    torch.testing.assert_close(model.up.weight.grad, gradient, rtol=1e-12, atol=1e-12)
    return sums


@pytest.mark.parametrize(
    ("how", "sums"),
    [
        ("plain", 2),  # forward of the row layer, and one gradient for both columns
        ("deepcopy", 2),
        ("inplace", 3),  # two inputs, two gradients
        ("checkpoint", 2),  # recomputation stops before the row layer
    ],
)
def test_one_sum_for_one_input(how, sums):
    assert run_ranks(backward, 2, how) == [sums] * 2


def test_reentrant_checkpoint():
    assert run_ranks(backward, 2, "checkpoint", reentrant=True) == [3, 3]


def no_graph():
    model = apply_tensor_parallel(Gated(), PLAN, dist.group.WORLD)
    x = torch.randn(2, 6)
    with torch.no_grad():
        first = model(x)
    x.mul_(2)
    assert not torch.equal(first, model(x).detach())


def test_without_gradients_nothing_is_kept():
    run_ranks(no_graph, 2)

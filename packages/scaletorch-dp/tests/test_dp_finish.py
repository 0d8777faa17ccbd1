"""An error at the end of backward leaves no other group's or wrapper's reduction unfinished."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as c10d
from in_turn import in_turn_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from scaletorch.dist.errors import MismatchError, StateError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.data_parallel import DataParallelBucket

in_turn = in_turn_of(__name__)


class Repeated(nn.Module):
    """A layer that runs several times in reentrant checkpoints, between two others."""

    def __init__(self):
        super().__init__()
        self.first, self.shared, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, times=3):
        x = self.first(x)
        for _ in range(times):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return self.last(x)


def loss_of(model, rank, times=3):
    x = torch.full((2, 4), 1.0 + rank, requires_grad=True)
    return model(x, times).square().mean()


def check_groups():
    """The layer that is used again is in the first group, and the last layer in the second."""
    torch.manual_seed(0)
    plain = Repeated()
    second = c10d.new_group([0, 1])
    groups = {"last.weight": second, "last.bias": second}
    model = DataParallelBucket(
        copy.deepcopy(plain), bucket_size=1, group=c10d.group.WORLD, groups=groups
    )
    rank = c10d.get_rank()
    with pytest.raises(StateError, match="got another gradient"):
        loss_of(model, rank).backward()
    assert model.first.weight.grad is None
    assert not any(
        bucket.launched for manager in model.bucket_managers for bucket in manager.buckets
    )
    model.zero_grad()
    loss_of(model, rank, times=1).backward()
    for each in range(2):
        loss_of(plain, each, times=1).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def check_wrappers():
    """The ranks disagree about the first wrapper; the second one is summed all the same."""
    models = [DataParallelBucket(nn.Linear(4, 1), group=c10d.group.WORLD) for _ in range(2)]
    x = torch.ones(1, 4)
    sum(model(x).sum() for model in models).backward()
    if c10d.get_rank():
        models[0].zero_grad()
    with pytest.raises(MismatchError, match="a different number of times"):
        sum(model(x).sum() for model in models).backward()
    assert models[0].weight.grad is None
    torch.testing.assert_close(models[1].weight.grad, torch.full((1, 4), 4.0))


def test_other_groups_and_wrappers_are_finished_after_an_error():
    run_ranks(in_turn, 2, [check_groups, check_wrappers])


@pytest.mark.parametrize("options", [{"check_finite": True}, {"grad_type": torch.float32}], ids=str)
def test_one_process_runs_a_layer_several_times_as_plain_torch(options):
    torch.manual_seed(0)
    plain = Repeated().bfloat16()
    model = DataParallelBucket(copy.deepcopy(plain), bucket_size=1, **options)
    for module in (plain, model):
        x = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
        module(x).square().mean().backward()
    rtol = 0.02 if "grad_type" in options else 0  # sums in float32 are rounded once
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=rtol, atol=rtol / 10)

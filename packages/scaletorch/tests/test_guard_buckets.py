"""What one rank alone refuses in the middle of a step: under a guard all others hear the cause."""

import pytest
import torch
from torch import nn

from scaletorch import guard
from scaletorch.dist import RankFaultError, get_rank
from scaletorch.dist.errors import StateError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.data_parallel import DataParallelBucket, shard_optimizer

GUILTY = 1


def train(change):
    """Train a few steps; in the third the guilty rank does something else."""
    model = DataParallelBucket(nn.Linear(4, 4), group=torch.distributed.group.WORLD)
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    for step in range(4):
        now = step == 2 and get_rank() == GUILTY
        if now and change == "parameter":
            model.module.extra = nn.Parameter(torch.zeros(1))
        model.require_backward_grad_sync = not (now and change == "no_sync")
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.step()


def heard(change):
    torch.manual_seed(0)
    try:
        with guard.watch():
            train(change)
    except RankFaultError as fault:
        return "told", fault.ranks, str(fault)
    except StateError as error:
        return "raised", str(error)
    return None


CAUSES = {
    "parameter": "extra came after the module was wrapped",
    "no_sync": "has not been synchronised",
}


@pytest.mark.parametrize("change", CAUSES)
def test_the_others_hear_what_a_rank_refused(change):
    for rank, said in enumerate(run_ranks(heard, 3, change, timeout=200)):
        if rank == GUILTY:
            assert said[0] == "raised"
        else:
            assert said[:2] == ("told", (GUILTY,))
        assert CAUSES[change] in said[-1]

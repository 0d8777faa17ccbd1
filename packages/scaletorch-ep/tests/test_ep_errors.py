"""Errors of users' own code in experts: all ranks hear of them at once."""

import pytest
import torch
import torch.distributed as c10d
from torch import nn

from scaletorch.dist import MismatchError
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.expert_parallel import apply_expert_parallel

WORLD = c10d.group.WORLD
HIDDEN = 6


class OwnError(Exception):
    """Of no kind that this library knows."""


class Stacked(nn.Module):
    """Four experts, which fail on numbers beyond all bounds."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.weight = 4, nn.Parameter(torch.ones(4, HIDDEN))

    def forward(self, hidden, top_k_index, top_k_weights):
        if hidden.isinf().any():
            raise OwnError("of rows 0 to 2")
        return hidden * self.weight[top_k_index[:, 0]] * top_k_weights


@distributed_test(world_size=2)
def test_what_a_module_of_experts_raises_is_heard_on_all():
    rank, experts = c10d.get_rank(), nn.ModuleDict({"experts": Stacked()})
    experts = apply_expert_parallel(experts, {"experts": "experts"}, WORLD)["experts"]
    rows, to = torch.ones(2, HIDDEN), torch.tensor([[0], [3 * rank]])  # of rank 0 none leaves
    told = r"rank 1 cannot take part in .*the experts 'experts': OwnError: of rows 0 to 2"
    expected, words = (OwnError, "of rows 0 to 2") if rank == 1 else (MismatchError, told)
    for _ in range(2):
        with pytest.raises(expected, match=words):
            experts(
                torch.tensor([[1.0], [torch.inf if rank else 1.0]]) * rows, to, torch.ones(2, 1)
            )
    assert torch.equal(experts(rows, to, torch.ones(2, 1)), rows)

"""What a forward leaves behind is put back: draws, buffers and attributes."""

import random

import pytest
import torch
from torch import nn

from scaletorch.parallel.pg_manager.building import Attributes, restored


class Leaving(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.calls = 0

    def forward(self, x):
        self.calls, self.seen, self.kept = self.calls + 1, (1, "text"), x * random.random()
        return self.norm(x + torch.randn_like(x))


@pytest.mark.parametrize("every", [False, True])
def test_all_is_as_before(every):
    model, drawn = Leaving(), [torch.get_rng_state(), random.getstate()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with restored(model, every=every):
        held = Attributes(model.modules())
        model(torch.ones(4, 3) * torch.arange(4.0)[:, None])
        assert held.changed()
        assert not torch.equal(model.norm.running_mean, state["norm.running_mean"])
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.calls == 0
    assert not hasattr(model, "seen")
    assert not hasattr(model, "kept")

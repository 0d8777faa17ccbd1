"""What a forward leaves behind is put back: draws, buffers and attributes."""

import random
from typing import NamedTuple

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


class State(NamedTuple):
    calls: int


class Options:
    pass


class Keeping(nn.Module):
    """Keeps a shape, a named tuple, a sparse tensor, NaN, and an object with another dict."""

    def __init__(self):
        super().__init__()
        self.shape, self.state = torch.Size([1]), State(0)
        self.sparse, self.nan = torch.eye(2).to_sparse(), torch.tensor(float("nan"))
        self.options = Options()

    def forward(self, x):
        self.shape, self.state = x.shape, State(self.state.calls + 1)
        self.options.__dict__ = {"a": 2}
        return x


def test_tuples_sparse_tensors_and_other_dicts_are_followed():
    model = Keeping()
    version = model.nan._version
    with restored(model):
        held = Attributes(model.modules())
        model(torch.ones(3))
        assert {*held.changed()} == {"shape", "state", "options"}
    assert model.shape == torch.Size([1])
    assert model.state == State(0)
    assert model.nan._version == version

"""A wrapper that no name shows, alone, nested, and inside other modules."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from scaletorch.parallel.pg_manager import ModuleWrapper


class Outer(ModuleWrapper):
    pass


class Net(nn.Module):
    depth = 3

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x, *, scale=1.0):
        return self.head(self.norm(self.embed(x))) * scale


def names(pairs):
    return [name for name, _ in pairs]


@pytest.mark.parametrize("wrap", [ModuleWrapper, lambda net: Outer(ModuleWrapper(net))])
def test_names_are_the_plain_ones(wrap):
    net = Net()
    wrapped = wrap(net)
    assert names(wrapped.named_modules()) == names(net.named_modules())
    assert names(wrapped.named_parameters()) == names(net.named_parameters())
    assert names(wrapped.named_buffers()) == names(net.named_buffers())
    kept = names(wrapped.named_parameters(remove_duplicate=False))
    assert kept == ["embed.weight", "norm.weight", "norm.bias", "head.weight"]
    assert list(wrapped.state_dict()) == list(net.state_dict())
    assert wrapped.state_dict()._metadata.keys() == net.state_dict()._metadata.keys()
    assert wrapped.get_parameter("norm.weight") is net.norm.weight
    assert wrapped.get_submodule("head") is net.head
    assert wrapped.depth == 3


def test_state_goes_both_ways_between_plain_and_wrapped():
    source, target = Net(), Outer(ModuleWrapper(Net()))
    nn.init.normal_(source.norm.weight)
    assert str(target.load_state_dict(source.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(target.module.module.norm.weight, source.norm.weight)
    back = Net()
    back.load_state_dict(target.state_dict())
    assert torch.equal(back.embed.weight, source.embed.weight)


def test_errors_of_loading_show_plain_names():
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "embed.weight"'):
        ModuleWrapper(Net()).load_state_dict({"other": torch.zeros(1)})


def test_inside_another_module_names_stay_plain_and_state_loads():
    plain, wrapped = nn.Sequential(Net(), Net()), nn.Sequential(ModuleWrapper(Net()), Net())
    nn.init.normal_(plain[0].norm.bias)
    assert names(wrapped.named_parameters()) == names(plain.named_parameters())
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    state = plain.state_dict()
    assert str(wrapped.load_state_dict(state)) == "<All keys matched successfully>"
    assert torch.equal(wrapped[0].module.norm.bias, plain[0].norm.bias)
    assert "0.norm.bias" in state  # the caller's mapping is untouched


def test_forward_train_and_moves_reach_the_module():
    wrapped = Outer(ModuleWrapper(Net()))
    x = torch.tensor([[0, 1], [2, 3]]).reshape(-1)
    wrapped.eval()
    assert not wrapped.module.module.norm.training
    assert torch.equal(wrapped(x, scale=2.0), 2 * wrapped.module(x))
    wrapped.double()
    assert {p.dtype for p in wrapped.parameters()} == {torch.float64}
    wrapped(x).sum().backward()
    wrapped.zero_grad()
    assert all(p.grad is None for p in wrapped.parameters())


def test_missing_attributes_name_the_wrapped_class():
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing'"):
        ModuleWrapper(Net()).nothing  # noqa: B018


def test_copies_and_pickles():
    wrapped = Outer(ModuleWrapper(Net()))
    for twin in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert torch.equal(twin.norm.weight, wrapped.norm.weight)
        assert twin.norm is not wrapped.norm
        assert twin.head.weight is twin.embed.weight

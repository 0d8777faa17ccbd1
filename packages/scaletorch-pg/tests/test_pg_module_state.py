"""What a forward changes is put back: draws, buffers and attributes; digests compare bits."""

import random
from typing import NamedTuple

import pytest
import torch
from torch import nn

from scaletorch.parallel.pg_manager.building import Attributes, digest, digest_text, restored


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


@pytest.mark.filterwarnings("ignore:Sparse CS")  # torch, once: they are in beta
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.parametrize("value", [3.0, float("nan")])
def test_sparse_buffers_are_restored_and_written_only_if_changed(layout, value):
    dense = torch.diag(torch.tensor([1.0, value, 2.0]))
    model = nn.Module()
    model.register_buffer("sparse", dense.to_sparse(layout=layout))
    version = model.sparse._version
    with restored(model):
        pass
    assert model.sparse._version == version
    with restored(model):
        model.sparse.mul_(2)
    assert torch.equal(model.sparse.to_dense().nan_to_num(), dense.nan_to_num())


def test_digests_tell_bits_apart():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool):
        for shape in ((), (0,), (3,), (5, 7), (1021, 17), (2049, 33)):
            tensor = (torch.randn(shape) * 50).to(dtype)
            known = int(digest(tensor))
            assert int(digest(tensor.clone())) == known
            if not tensor.numel():
                continue
            for at in torch.randint(tensor.numel(), (20,)).tolist():
                other = tensor.clone().view(-1)
                other[at] = ~other[at] if dtype is torch.bool else other[at] + 1
                if torch.equal(other, tensor.view(-1)):
                    continue
                assert int(digest(other)) != known
    assert int(digest(torch.zeros(8))) != int(digest(torch.zeros(16)))
    assert int(digest(torch.zeros(4))) != int(digest(-torch.zeros(4)))
    part = torch.arange(100.0)[3:50]
    assert int(digest(part)) == int(digest(part.clone()))


def test_what_has_no_values_or_is_sparse_has_a_text():
    assert digest_text(torch.zeros(2, device="meta")) == "none"
    dense = torch.diag(torch.arange(4.0))
    assert digest_text(dense.to_sparse()) == digest_text(dense) != digest_text(dense + 1)
    assert int(digest(dense.to_sparse())) == int(digest(dense))
    assert digest_text(dense.to(torch.complex64)) != digest_text(dense)

"""What a shard cannot do is refused in words, and a refusal leaves everything as it was."""

import copy
import io
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm

from scaletorch.dist.errors import InvalidArgumentError, StateError
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.tensor_parallel import apply_tensor_parallel, gather_state_dict, take_own

PLAN = {"0": "vocab", "2": "column", "4": "row", "6": "column_gather"}


def plain():
    torch.manual_seed(0)
    layers = nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
    return nn.Sequential(*layers, nn.Linear(8, 8), nn.Linear(8, 20))


def made():
    return apply_tensor_parallel(plain(), PLAN, dist.group.WORLD)


def backward(model):
    model(torch.arange(8).view(2, 4)).square().mean().backward()


@distributed_test(world_size=2)
def test_a_pickle_is_refused_and_a_copy_works():
    shares = {"plan": {"": "sequence_layer", "0": "column", "1": "row"}, "sequence_parallel": True}
    layer = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for model, x in (
        (made(), torch.arange(8).view(2, 4)),
        (apply_tensor_parallel(layer, group=dist.group.WORLD, **shares), torch.randn(2, 4, 8)),
    ):
        for write in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
            with pytest.raises(StateError, match=r"cannot be pickled.*gather_state_dict\(model\)"):
                write(model)
        torch.save(gather_state_dict(model), io.BytesIO())
        for twin in (copy.deepcopy(model), copy.copy(model)):
            torch.testing.assert_close(twin(x), model(x))
        assert copy.deepcopy(model)[1].weight is not model[1].weight


@distributed_test(world_size=2)
def test_parametrizations_of_a_shard_are_refused():
    for change in (
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    ):
        for index in (0, 2, 4):
            model = made()
            change(model[index])
            with pytest.raises(StateError, match=r"a parameter of this .* alone, as weight_norm"):
                backward(model)
        model = made()
        change(model[5])  # every rank has it whole
        backward(model)
    model = made()
    prune.random_unstructured(model[2], "bias", 0.5)
    with pytest.raises(StateError, match="is computed from others"):
        backward(model)
    alone = apply_tensor_parallel(
        plain(), PLAN, dist.new_group([dist.get_rank()], use_local_synchronization=True)
    )
    parametrizations.weight_norm(alone[2])
    backward(alone)


class ByNorm(torch.optim.SGD):
    """Divides each gradient by its norm; nothing in its name says so."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        super().step()


class Muon8bit(torch.optim.SGD):
    """Treats every element alike, whatever its name says."""


@distributed_test(world_size=2)
def test_optimizers_of_whole_matrices_are_refused_before_the_first_update():
    kinds = {
        "Muon": torch.optim.Muon,
        "Adafactor": torch.optim.Adafactor,
        "LBFGS": torch.optim.LBFGS,
        "ByNorm": ByNorm,
    }
    for name, kind in kinds.items():
        model = made()
        matrices = [p for p in model.parameters() if p.ndim == 2]
        optimizer = kind(matrices)
        backward(model)
        before = copy.deepcopy(model.state_dict())
        found = "cannot be tried on a matrix" if name == "LBFGS" else "looks at whole parameters"
        message = rf"{name} {found}.*, but 0.weight \(10, 8\) is of a model whose"
        with pytest.raises(InvalidArgumentError, match=message):
            optimizer.step(lambda: 0.0) if name == "LBFGS" else optimizer.step()
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        whole = kind([model[5].weight])  # every rank has it
        whole.step(lambda: 0.0) if name == "LBFGS" else whole.step()
        whole.add_param_group({"params": [model[2].weight]}) if name != "LBFGS" else None
        if name != "LBFGS":
            with pytest.raises(InvalidArgumentError, match=r"but 2\.weight"):
                whole.step()
    twin = copy.deepcopy(made())
    stand_in = nn.Parameter(twin[2].weight.detach().double())
    stand_in.stands_for = twin[2].weight  # as a sharded optimizer's master does
    stand_in.grad = torch.ones_like(stand_in)
    with pytest.raises(InvalidArgumentError, match="Muon looks at whole parameters"):
        torch.optim.Muon([stand_in]).step()
    other = plain()  # a model that is not divided
    backward(other)
    torch.optim.Muon([other[2].weight]).step()
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, Muon8bit):
        model = made()
        backward(model)
        kind(model.parameters(), lr=0.1, foreach=True).step()


@distributed_test(world_size=2)
def test_a_watched_model_can_be_freed():
    model = made()
    gone = weakref.ref(model[2].weight)
    del model
    assert gone() is None


@distributed_test(world_size=2)
def test_a_misspelt_name_is_noticed():
    model = made()
    whole = torch.zeros(16, 8)
    assert take_own(model, "2.weight", whole).shape == (8, 8)
    for name, near in (
        ("2.wieght", "weight, bias"),
        ("1.wight", "weight, bias"),
        ("2x.weight", "0, 1, 2"),
    ):
        with pytest.raises(InvalidArgumentError, match=rf"no '{name}', but a module .*{near}"):
            take_own(model, name, whole)
    model[2] = nn.Identity()  # as of another pipeline stage: which names it has is not known here
    assert take_own(model, "2.weight", whole) is whole

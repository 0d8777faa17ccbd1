"""Stages of a model on meta: only their own tensors become real, with the plain model's values."""

import one_process
import pytest
import torch
from torch import nn

from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.pipeline_parallel import (
    PipelineParallel,
    materialize,
    meta_parameters,
    train_step_pipeline,
)
from scaletorch.parallel.pipeline_parallel.splitting.split import place
from scaletorch.parallel.pipeline_parallel.stages.cut import cut


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.arange(1.0, 5.0), persistent=False)

    def forward(self, x):
        return (self.inv_freq * torch.arange(x.shape[1])[:, None]).cos()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.up = nn.Linear(4, 4)

    def forward(self, x, turn):
        return x + self.up(self.norm(x.transpose(1, 2)).transpose(1, 2) * turn)


class Net(one_process.Net):
    layer, num_layers, vocabulary = Layer, 4, 8

    def __init__(self):
        super().__init__(tied=True)
        self.rotary = Rotary()
        self.layers[1].up.bias.requires_grad_(False)
        self.layers[2].up.weight = self.layers[1].up.weight

    def run(self, x):
        turn = self.rotary(x)
        for layer in self.layers:
            x = layer(x, turn)
        return x


class Asked(dict):
    """A state that notes which of its names are read."""

    def __init__(self, *args):
        super().__init__(*args)
        self.read = []

    def __getitem__(self, name):
        self.read.append(name)
        return super().__getitem__(name)


class File:
    """What safetensors' ``safe_open`` gives: no mapping."""

    def __init__(self, tensors):
        self.tensors = tensors

    def keys(self):
        return list(self.tensors)

    def get_tensor(self, name):
        return self.tensors[name]


def plain():
    torch.manual_seed(0)
    model = Net()
    for _ in range(2):  # running statistics other than at the start
        model(torch.arange(8).reshape(2, 4))
    return model


def stage_on_meta(stage, num_stages=2):
    with meta_parameters():
        model = Net()
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    assert nn.Linear(2, 2).weight.device.type == "cpu"
    cut(model, place(model, None, num_stages), (stage,))
    return model


def same(a, b):
    return torch.equal(a.detach(), b.detach())


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_reads_and_allocates_its_own_tensors_alone(stage):
    whole = plain()
    state = Asked(whole.state_dict())
    model = stage_on_meta(stage)
    before = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    materialize(model, "cpu", state)
    assert {id(tensor) for tensor in (*model.parameters(), *model.buffers())} == before
    own = model.state_dict()
    names = (("embed.", "layers.0.", "layers.1."), ("layers.2.", "layers.3.", "head."))[stage]
    assert own.keys() == {name for name in state if name.startswith(names)}
    assert sorted(state.read) == sorted(own)
    assert all(same(value, state[name]) for name, value in own.items())
    allocated = sum(p.numel() for p in model.parameters() if not p.is_meta)
    assert allocated == 32 + 28 + 28
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    wanted = dict(whole.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == wanted[name].requires_grad
        assert parameter.untyped_storage().data_ptr() != state[name].untyped_storage().data_ptr()
    assert same(model.rotary.inv_freq, whole.rotary.inv_freq)


def test_tied_parameters_stay_tied_and_any_of_their_names_will_do():
    whole = plain()
    values = whole.state_dict()
    del values["head.weight"], values["layers.1.up.weight"]
    with meta_parameters():
        model = Net()
    model.head.weight.mark = "kept"
    materialize(model.double(), "cpu", File(values))
    whole.double()  # values take the dtype of the model
    assert model.head.weight is model.embed.weight
    assert model.layers[2].up.weight is model.layers[1].up.weight
    assert model.head.weight.mark == "kept"
    ids = torch.arange(8).reshape(2, 4)
    assert same(model.eval()(ids), whole.eval()(ids))


def test_a_model_built_wholly_on_meta():
    with torch.device("meta"):
        model = Net()
    state = plain().state_dict()
    text = r"are not persistent, .*: rotary\.inv_freq; build the model under meta_parameters\(\)"
    with pytest.raises(InvalidArgumentError, match=text):
        materialize(model, "cpu", state)
    assert all(p.is_meta for p in model.parameters())
    model.rotary.inv_freq = Rotary().inv_freq
    materialize(model, "cpu", state)
    assert all(same(value, state[name]) for name, value in model.state_dict().items())


def test_states_that_do_not_fit_leave_the_stage_as_it_was():
    model = stage_on_meta(1)
    state = plain().state_dict()
    lacking = {n: v for n, v in state.items() if n not in ("head.weight", "layers.2.norm.bias")}
    text = r"lacks 2 of the stage's 15 tensors: layers\.2\.norm\.bias, head\.weight; name its"
    with pytest.raises(InvalidArgumentError, match=text):
        materialize(model, "cpu", lacking)
    for name, value, text in (
        (
            "head.weight",
            torch.zeros(4, 4),
            r"head\.weight .* \(8, 4\), got \(4, 4\); pass",
        ),
        ("layers.2.up.bias", None, r"layers\.2\.up\.bias .* expected \(4,\), got NoneType"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            materialize(model, "cpu", {**state, name: value})
    with pytest.raises(InvalidArgumentError, match="or an open safetensors file, got str"):
        materialize(model, "cpu", "model.safetensors")
    assert all(p.is_meta for p in model.parameters())


@distributed_test(world_size=2)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_training_from_meta_is_training_from_the_whole_model(schedule):
    """The checkpoint holds each parameter of several stages once, by the other stage's name."""
    whole = plain()
    state = whole.state_dict()
    del state["head.weight"], state["layers.2.up.weight"]
    with meta_parameters():
        stage = PipelineParallel(Net(), group=torch.distributed.group.WORLD, schedule=schedule)
    materialize(stage, "cpu", state)
    like = PipelineParallel(whole, group=torch.distributed.group.WORLD, schedule=schedule)
    batches = one_process.token_batches(vocabulary=8)
    for model in (stage, like):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            train_step_pipeline(model, batches)
            optimizer.step()
            optimizer.zero_grad()
    found, wanted = stage.state_dict(), like.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)

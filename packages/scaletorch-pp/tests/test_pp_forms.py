"""Whatever stages pass on: tensors of all kinds, in containers, of sizes that change.

Forms that change from step to step with reason are learned anew; without it that is an error.
"""

import os
from unittest.mock import patch

import pytest
import torch
from one_process import (
    Net,
    accumulate,
    build,
    forward_everywhere,
    pair,
    split,
    trains_on,
)
from torch import nn

from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.pipeline_parallel import StageError, train_step_pipeline
from scaletorch.parallel.pipeline_parallel.runtime.forms import (
    NOTHING,
    Form,
    Passed,
    Place,
    from_header,
    to_header,
)

WIDTH = 4
NAMES = ("x", "mask", "count", "y", "bias", "nothing")


def unpacked(state):
    return tuple(state.values()) if isinstance(state, dict) else tuple(state)


def packed(kind, entries):
    if kind == "dict":
        return dict(zip(NAMES, entries, strict=True))
    return list(entries) if kind == "list" else entries


class Embed(nn.Embedding):
    """Makes two trained tensors, and a bool, an int64, a float and an empty one that are not."""

    def __init__(self, kind):
        super().__init__(8, WIDTH)
        self.kind = kind

    def forward(self, ids):
        x = super().forward(ids)
        count = torch.arange(ids.shape[1])
        bias = torch.linspace(0, 1, ids.shape[1], dtype=x.dtype)
        y = x.sum(1).transpose(0, 1) * 0.5  # not contiguous
        return packed(self.kind, (x, ids > 2, count, y, bias, x.new_empty(0, 3).detach()))


class Layer(nn.Module):
    """Some return a tensor as it came, some make a new one."""

    def __init__(self, kind, index):
        super().__init__()
        self.kind, self.index = kind, index
        self.linear, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, state):
        x, mask, count, y, bias, nothing = unpacked(state)
        assert (mask.dtype, count.dtype, nothing.shape) == (torch.bool, torch.int64, (0, 3))
        assert type(state).__name__ == self.kind
        x = x + self.linear(x + bias[:, None]).tanh() * mask[..., None] + count[:, None] * 0.1
        x = x + y.transpose(0, 1)[:, None]
        if self.index % 3:
            y, mask = y + self.side(y.t()).t().tanh(), ~mask
        return packed(self.kind, (x, mask, count + 1, y, bias, nothing))


class Head(nn.Linear):
    def forward(self, state):
        x, mask, count, y, *_ = unpacked(state)
        return super().forward(x * mask[..., None] + y.transpose(0, 1)[:, None] * count[0])


class States(Net):
    def __init__(self, kind="tuple", num_layers=8):
        super().__init__()
        self.embed = Embed(kind)
        self.layers = nn.ModuleList(Layer(kind, index) for index in range(num_layers))
        self.head = Head(WIDTH, 3)


def make_batches(*sizes):
    """Micro-batches of these batch sizes and lengths."""
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(4, size, generator=generator)} for size in sizes]


def loss(output, batch):
    wide = output.float() if output.dtype == torch.bfloat16 else output
    return wide.square().sum()


def step(stage, plain, *sizes):
    # Tensors that were sent are contiguous, and float64 products of such ones may round otherwise.
    trains_on(stage, plain, make_batches(*sizes), loss, exact=False, atol=1e-12)


def forwards(stage, plain, *sizes):
    batches = make_batches(*sizes)
    outputs = forward_everywhere(stage, batches)
    for output, batch in zip(outputs, batches, strict=True):
        expected = plain(batch["input_ids"])
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


@distributed_test(world_size=3)
def test_several_tensors_of_many_sizes():
    """Each container, with a schedule of one stage a rank, of two, and of parted backwards."""
    schedules = {"tuple": "1f1b", "list": "interleaved_1f1b", "dict": "zb_v"}
    for container, schedule in schedules.items():
        plain, stage = pair(States, container, schedule=schedule)
        step(stage, plain, (2, 5), (2, 5), (2, 5), (2, 3), (1, 5))  # a last, smaller one
        step(stage, plain, (2, 5), (2, 5), (2, 5), (2, 3), (1, 5))  # all known now
        forwards(stage, plain, (2, 5), (2, 7))
        step(stage, plain, (2, 7), (2, 5))  # a new one before a known one
        forwards(stage, plain, (2, 7), (2, 5))
        for parameter in (*stage.module.embed.parameters(), *plain.embed.parameters()):
            parameter.requires_grad_(False)
        step(stage, plain, (2, 5), (2, 7))  # the first stage passes on what needs no gradient


def thaw(stage, plain, trained):
    """Let these of the embedding, the layers and the head be trained, and no others."""
    for model in (stage.module, plain):
        for index, layer in enumerate([model.embed, *model.layers, model.head]):
            for parameter in layer.parameters():
                parameter.requires_grad_(index in trained)


@distributed_test(world_size=2)
def test_parameters_frozen_and_unfrozen_between_steps():
    for schedule in ("1f1b", "zb_v"):
        plain, stage = pair(States, schedule=schedule)
        # All; all but some layers; the head alone; the first stage of 1F1B alone; all again.
        for trained in (range(10), range(4, 10), [9], range(5), range(10)):
            thaw(stage, plain, trained)
            step(stage, plain, (2, 5), (2, 3))
            forwards(stage, plain, (2, 5))


@distributed_test(world_size=3)
def test_more_forms_than_are_remembered():
    with patch("scaletorch.parallel.pipeline_parallel.stages.stage.MANY_FORMS", 5):
        plain, stage = pair(States, "tuple", 3)
        for length in (2, 3, 4, 5, 6, 7, 2, 3, 8, 9, 7, 2):  # forgotten, and learned again
            step(stage, plain, (1, length), (2, length))
        assert len(stage.runtime.forms) <= 5 + 2


class Fickle(nn.Module):
    """Returns what it was given, but sometimes in another form."""

    change = None

    def forward(self, x):
        return x if self.change is None else self.change(x)


@distributed_test(world_size=3)
def test_models_that_are_cast_between_steps():
    plain = build(Net, 3).float()
    stage = split(plain, "zb_h1")
    for dtype in (torch.float64, torch.bfloat16, torch.float32, torch.bfloat16):
        plain.to(dtype)
        stage.to(dtype)
        trains_on(stage, plain, make_batches((2, 5), (1, 5)), loss)


@distributed_test(world_size=3)
def test_autocast_that_changes_between_steps():
    plain = build(Net, 3).float()
    stage = split(plain)
    batches = make_batches((2, 5), (2, 5), (1, 5))
    for dtype, wire in [
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (None, None),
    ]:
        stage.zero_grad()
        plain.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            train_step_pipeline(stage, batches, dtype=wire, loss_fn=loss)
            accumulate(plain, batches, loss)
        references = dict(plain.named_parameters())
        for name, parameter in stage.named_parameters():
            expected = references[name].grad
            assert (parameter.grad - expected).norm() <= 0.03 * expected.norm(), (dtype, wire, name)


LONG = lambda x: {"long " * 1999: x, "x": x}  # noqa: E731
OTHER_FORMS = [torch.Tensor.double, lambda x: x[:, :2], torch.Tensor.detach, lambda x: (x, x), LONG]
NO_FORMS = [lambda x: (x, object()), lambda x: {"x": x, 3: x}, lambda x: [None, [2]]]


@distributed_test(world_size=3)
def test_a_form_that_changes_without_reason_or_cannot_be_passed_on():
    plain = build(Net, 3).float()
    plain.layers[1] = Fickle()  # the second stage has no parameters
    stage = split(plain)
    batches = make_batches((2, 5), (2, 5))
    kind = InvalidArgumentError if stage.rank == 1 else StageError
    if stage.rank == 1:
        stage.module.layers[1].change = LONG
    for _ in range(2):
        with pytest.raises(kind, match=r"takes \d+ bytes to describe, more than 8192: pass on few"):
            train_step_pipeline(stage, batches, loss_fn=loss)
    if stage.rank == 1:
        stage.module.layers[1].change = None
    trains_on(stage, plain, batches, loss)
    another = r"passes on .*, and passed on \(2, 5, 4\) of torch.float32"
    none = r"layers must pass on a tensor, or tuples, .* got (object|int|no tensor);"
    for change, text in [*((c, another) for c in OTHER_FORMS), *((c, none) for c in NO_FORMS)]:
        if stage.rank == 1:
            stage.module.layers[1].change = change
        with pytest.raises(kind, match=text):
            train_step_pipeline(stage, batches, loss_fn=loss)
        if stage.rank == 1:
            stage.module.layers[1].change = None
        trains_on(stage, plain, batches, loss)


DTYPES = (torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int8)


class Made:
    """Is pickled as the call of a function."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_form_comes_back_from_its_header(dtype):
    trained = torch.ones(2, 3, requires_grad=True)
    hidden = {"states": (trained, [torch.ones(3, 0, dtype=dtype)]), "rate": 0.5, "name": None}
    places = {Place(1, 2, 3): (0, 1)}
    for value in (trained, hidden, Passed(hidden, [trained], places)):
        assert from_header(to_header(Form(value))) == Form(value)
    assert from_header(to_header(NOTHING)) == NOTHING


# The second one is of an allowed module.
CALLS = [Made(os.mkdir, ("made_by_a_header",)), Made(from_header, (torch.zeros(1),))]


@pytest.mark.parametrize("sent", [*CALLS, nn.Linear(1, 1)])
def test_nothing_else_is_made_of_a_header(sent, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"a message between stages names .*, which hid"):
        from_header(to_header(sent))
    assert not list(tmp_path.iterdir())

"""Forms that change from step to step: with reason they are learned anew, without it an error."""

import copy

import pytest
import torch
from torch import nn

from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.pipeline_parallel import PipelineParallel, StageError, train_step_pipeline

WIDTH = 4


class Tensors(nn.Module):
    """Layers that pass on one tensor."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Fickle(nn.Module):
    """Returns what it was given, but sometimes in another form."""

    def __init__(self):
        super().__init__()
        self.change = None

    def forward(self, x):
        return x if self.change is None else self.change(x)


def make_batches(*sizes):
    """Micro-batches of these batch sizes and lengths."""
    return [{"input_ids": torch.randint(8, size)} for size in sizes]


def loss(output, batch):
    return output.float().square().sum()


def world():
    return torch.distributed.group.WORLD


def step(stage, plain, *sizes):
    """Train a step without labels, and compare it with one process, bit by bit."""
    batches = make_batches(*sizes)
    stage.zero_grad()
    plain.zero_grad()
    train_step_pipeline(stage, batches, loss_fn=loss)
    for batch in batches:
        loss(plain(batch["input_ids"]), batch).backward()
    references = dict(plain.named_parameters())
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter.grad, references[name].grad), name


@distributed_test(world_size=3)
def test_models_that_are_cast_between_steps():
    plain = Tensors()
    stage = PipelineParallel(copy.deepcopy(plain), group=world(), schedule="zb_h1")
    for dtype in (torch.float64, torch.bfloat16, torch.float32, torch.bfloat16):
        plain.to(dtype)
        stage.to(dtype)
        step(stage, plain, (2, 5), (1, 5))


@distributed_test(world_size=3)
def test_autocast_that_changes_between_steps():
    torch.manual_seed(0)
    plain = Tensors()
    stage = PipelineParallel(copy.deepcopy(plain), group=world())
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
            for batch in batches:
                loss(plain(batch["input_ids"]), batch).backward()
        references = dict(plain.named_parameters())
        for name, parameter in stage.named_parameters():
            expected = references[name].grad
            assert (parameter.grad - expected).norm() <= 0.03 * expected.norm(), (dtype, wire, name)


@distributed_test(world_size=3)
def test_a_form_that_changes_without_reason():
    model = Tensors()
    model.layers[1] = Fickle()  # a stage without parameters
    stage = PipelineParallel(copy.deepcopy(model), group=world())
    step(stage, model, (2, 5), (2, 5))
    kind = InvalidArgumentError if stage.rank == 1 else StageError
    for change in (torch.Tensor.double, lambda x: x[:, :2], torch.Tensor.detach,
                   lambda x: (x, x), lambda x: {"long " * 999: x, "x": x}):  # fmt: skip
        if stage.rank == 1:
            stage.module.layers[1].change = change
        with pytest.raises(kind, match=r"passes on .*, and passed on \(2, 5, 4\) of torch.float32"):
            train_step_pipeline(stage, make_batches((2, 5), (2, 5)), loss_fn=loss)
        if stage.rank == 1:
            stage.module.layers[1].change = None
        step(stage, model, (2, 5), (2, 5))


@distributed_test(world_size=3)
def test_what_cannot_be_passed_on():
    model = Tensors()
    model.layers[1] = Fickle()
    stage = PipelineParallel(model, group=world())
    kind = InvalidArgumentError if stage.rank == 1 else StageError
    for change in (lambda x: (x, object()), lambda x: {"x": x, 3: x}, lambda x: [None, [2]]):
        if stage.rank == 1:
            stage.module.layers[1].change = change
        with pytest.raises(kind, match=r"layers must pass on a tensor, or tuples, .* got a "):
            train_step_pipeline(stage, make_batches((2, 5)), loss_fn=loss)


@distributed_test(world_size=3)
def test_a_form_that_is_too_long():
    model = Tensors()
    model.layers[1] = Fickle()
    stage = PipelineParallel(copy.deepcopy(model), group=world())
    kind = InvalidArgumentError if stage.rank == 1 else StageError
    if stage.rank == 1:
        stage.module.layers[1].change = lambda x: {"long " * 999: x, "x": x}
    for _ in range(2):
        with pytest.raises(kind, match=r"takes \d+ bytes to describe, more than 4096: pass fewer"):
            train_step_pipeline(stage, make_batches((2, 5), (2, 5)), loss_fn=loss)
    if stage.rank == 1:
        stage.module.layers[1].change = None
    step(stage, model, (2, 5), (2, 5))

"""Messages in batches, one batch after another as on a stream of a device, do not deadlock."""

import copy
from unittest.mock import patch

import pytest
import torch
from torch import nn

from scaletorch.dist import exchange
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pipeline_parallel import (
    SCHEDULES,
    PipelineParallel,
    StageError,
    pipeline_forward,
    train_step_pipeline,
)
from scaletorch.parallel.pipeline_parallel.runtime import posts

TRAINING = [name for name in SCHEDULES if name != "forward_only"]


class Done:
    def wait(self):
        pass


def as_on_a_stream(sends, recvs, group, async_op):
    """Wait for each batch, and in a batch for the first messages with each rank, as NCCL does."""
    while sends or recvs:
        first = [{peer: (tensor, peer) for tensor, peer in reversed(s)} for s in (sends, recvs)]
        taken = [list(messages.values()) for messages in first]
        sends, recvs = (
            [m for m in side if not any(m[0] is t for t, _ in chosen)]
            for side, chosen in zip((sends, recvs), taken, strict=True)
        )
        exchange(*taken, group)
    return Done()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, state):
        x, y = state
        return self.one(y).tanh(), self.two(x).tanh()


class Embed(nn.Embedding):
    def forward(self, ids):
        x = super().forward(ids)
        return x, x * 2


class Head(nn.Linear):
    def forward(self, state):
        return super().forward(state[0] + state[1])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = Embed(4, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(8))
        self.head = Head(4, 4)

    def forward(self, input_ids):
        state = self.embed(input_ids)
        for layer in self.layers:
            state = layer(state)
        return self.head(state)


def squares(output, batch):
    return output.square().sum()


def failing(output, batch):
    raise ZeroDivisionError("boom")


def steps(name):
    torch.manual_seed(0)
    plain = Net().double()
    world = torch.distributed.group.WORLD
    stage = PipelineParallel(copy.deepcopy(plain), group=world, schedule=name)
    for sizes in ([3], [3, 2, 3, 3, 1], [3, 2, 3, 3, 1]):
        batches = [{"input_ids": torch.arange(size)[None] % 4} for size in sizes]
        stage.zero_grad()
        plain.zero_grad()
        train_step_pipeline(stage, batches, loss_fn=squares)
        for batch in batches:
            squares(plain(batch["input_ids"]), batch).backward()
        references = dict(plain.named_parameters())
        for parameter_name, parameter in stage.named_parameters():
            assert torch.equal(parameter.grad, references[parameter_name].grad)
        with pytest.raises((ZeroDivisionError, StageError), match="boom"):
            train_step_pipeline(stage, batches, loss_fn=failing)
        for output, batch in zip(pipeline_forward(stage, batches), batches, strict=False):
            assert torch.equal(output, plain(batch["input_ids"]))


def on_a_stream(name):
    with (
        patch.object(posts, "has_streams", lambda group: True),
        patch.object(posts, "exchange", as_on_a_stream),
    ):
        steps(name)


@pytest.mark.parametrize(
    ("name", "world_size"), [*((name, 2) for name in TRAINING), ("1f1b", 4), ("zb_v", 4)]
)
def test_batches_in_order(name, world_size):
    run_ranks(on_a_stream, world_size, name)

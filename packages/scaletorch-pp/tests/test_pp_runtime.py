"""The runtime keeps no activation longer than its schedule says."""

import gc
import weakref
from unittest.mock import patch

import pytest
import torch
from torch import nn

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pipeline_parallel import (
    SCHEDULES,
    Action,
    PipelineParallel,
    derive_messages,
    one_f_one_b,
    train_step_pipeline,
)
from scaletorch.parallel.pipeline_parallel.runtime.mail import Key, Message
from scaletorch.parallel.pipeline_parallel.runtime.program import Task, in_steps
from scaletorch.parallel.pipeline_parallel.schedules.messages import program_of
from scaletorch.parallel.pipeline_parallel.schedules.simulate import proven
from scaletorch.parallel.pipeline_parallel.steps.work import Training

TRAINING = [name for name in SCHEDULES if name != "forward_only"]
ENDS = {"F": 1, "B": -1, "I": -1, "W": 0}  # what an action does to the number of live graphs


class Token:
    """Is alive as long as the graph of the forward that made it."""


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alive):
        ctx.token = Token()
        alive.add(ctx.token)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


class Layer(nn.Linear):
    def __init__(self, alive):
        super().__init__(4, 4)
        self.alive = alive

    def forward(self, x):
        return Noted.apply(super().forward(x), self.alive)


class Net(nn.Module):
    def __init__(self, num_layers, alive):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Layer(alive) for _ in range(num_layers))
        self.head = nn.Linear(4, 8)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def live_graphs(name):
    """Return after each action how many graphs are alive, and how many its schedule says."""
    alive = weakref.WeakSet()
    world = torch.distributed.group.WORLD
    num_ranks, num_micro_batches = world.size(), 5
    schedule = SCHEDULES[name](num_ranks, num_micro_batches)
    stage = PipelineParallel(Net(schedule.num_stages, alive), group=world, schedule=name)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    batches = [{"input_ids": ids, "labels": ids}] * num_micro_batches
    seen = []

    run = Training.run

    def counted(training, task):
        run(training, task)
        gc.collect()
        seen.append(len(alive))

    gc.disable()
    with patch.object(Training, "run", counted):
        train_step_pipeline(stage, batches)
    expected, live = [], 0
    for action in schedule.ranks[stage.rank]:
        live += ENDS[action.kind]
        expected.append(live)
    return seen, expected


@pytest.mark.parametrize("name", TRAINING)
def test_graphs_live_from_their_forward_to_their_backward(name):
    for seen, expected in run_ranks(live_graphs, 2, name):
        assert seen == expected


def test_one_rank_too():
    seen, expected = run_ranks(live_graphs, 1, "zb_v")[0]
    assert seen == expected


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rank_derives_its_program_alone(name):
    schedule = SCHEDULES[name](4, 6)
    alone = tuple(program_of(*proven(schedule), rank) for rank in range(4))
    assert alone == derive_messages(schedule)


def test_messages_begin_before_the_action_behind_them():
    program = derive_messages(one_f_one_b(2, 3))[1]
    steps = in_steps(program, (1,), 2)
    assert [step.task.action for step in steps[:-1]] == list(one_f_one_b(2, 3).ranks[1])
    hidden = [Message(Key(0, micro_batch, False), 0, True) for micro_batch in range(3)]
    places = {m: place for place, step in enumerate(steps) for m in step.messages}
    assert places[hidden[0]] == 0
    assert steps[0].task == Task(Action("F", 0), 1, Key(0, 0, False), None)
    assert steps[1].task == Task(Action("B", 0), 1, None, Key(1, 0, True))
    assert [places[message] for message in hidden] == sorted(places[m] for m in hidden)
    assert all(places[m] <= 2 * n for n, m in enumerate(hidden))

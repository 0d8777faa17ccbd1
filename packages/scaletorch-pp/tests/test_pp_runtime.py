"""The runtime keeps no activation longer than its schedule says."""

import gc
import weakref
from unittest.mock import patch

import torch
from one_process import Layer, Net, split, token_batches, world

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pipeline_parallel import SCHEDULES, train_step_pipeline
from scaletorch.parallel.pipeline_parallel.steps.training import Training

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


class NotedLayer(Layer):
    alive = None

    def forward(self, x):
        return Noted.apply(super().forward(x), self.alive)


class NotedNet(Net):
    layer = NotedLayer


def live_graphs(name):
    """Return after each action how many graphs are alive, and how many its schedule says."""
    alive = weakref.WeakSet()
    num_ranks, num_micro_batches = world().size(), 5
    schedule = SCHEDULES[name](num_ranks, num_micro_batches)
    NotedLayer.alive = alive
    stage = split(NotedNet(schedule.num_stages), name)
    seen = []

    run = Training.run

    def counted(training, task):
        run(training, task)
        gc.collect()
        seen.append(len(alive))

    gc.disable()
    with patch.object(Training, "run", counted):
        train_step_pipeline(stage, token_batches(num_micro_batches))
    expected, live = [], 0
    for action in schedule.ranks[stage.rank]:
        live += ENDS[action.kind]
        expected.append(live)
    return seen, expected


def all_live_graphs(names):
    return [live_graphs(name) for name in names]


def test_graphs_live_from_their_forward_to_their_backward():
    for found in run_ranks(all_live_graphs, 2, ["1f1b", "interleaved_1f1b", "zb_h1", "dualpipe_v"]):
        assert [seen for seen, _ in found] == [expected for _, expected in found]

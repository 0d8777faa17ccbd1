"""Schedules of one's own, those that do not fit, and what schedules keep."""

import gc
import itertools
import random
import weakref
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from one_process import Layer, Net, build, split, sum_loss, token_batches, trains_on, world

from scaletorch.dist import InvalidArgumentError, MismatchError
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.pipeline_parallel import (
    SCHEDULES,
    PipelineParallel,
    ScheduleError,
    check,
    interleaved_1f1b,
    train_step_pipeline,
    train_step_pipeline_1f1b,
    zb_v,
)
from scaletorch.parallel.pipeline_parallel.steps.training import Training

COUNT = 5
ENDS = {"F": 1, "B": -1, "I": -1, "W": 0}  # what an action does to the number of live graphs


def make_batches(count=COUNT):
    return token_batches(count)


def shuffled(schedule, seed):
    """Swap neighbouring actions of a rank, wherever the schedule stays valid."""
    generator = random.Random(seed)
    for _ in range(40):
        ranks = [list(actions) for actions in schedule.ranks]
        actions = generator.choice(ranks)
        at = generator.randrange(len(actions) - 1)
        actions[at : at + 2] = reversed(actions[at : at + 2])
        candidate = replace(schedule, name="mine", ranks=tuple(map(tuple, ranks)))
        try:
            check(candidate)
        except ScheduleError:
            continue
        schedule = candidate
    return schedule


@distributed_test(world_size=4)
def test_a_schedule_of_ones_own():
    for builder, seed in [(zb_v, 0), (zb_v, 1), (interleaved_1f1b, 2)]:
        plain = build(Net)
        mine = shuffled(builder(world().size(), COUNT), seed)
        assert mine.ranks != builder(world().size(), COUNT).ranks
        stage = split(plain, mine)
        for _ in range(2):
            trains_on(stage, plain, make_batches(), exact=False)
        with pytest.raises(InvalidArgumentError, match="is for 4 ranks and 5 micro-batches, and"):
            train_step_pipeline(stage, make_batches(4), loss_fn=sum_loss)


@distributed_test(world_size=2)
def test_schedules_that_do_not_fit():
    rank = world().rank()
    for schedule, text in [
        ("zb_w", "schedule 'zb_w' is not one of afab, 1f1b"),
        (3, "must be a name, a Schedule, or a function .* got int"),
        (zb_v(3, 4), "is for 3 ranks and 4 micro-batches, and"),
    ]:
        with pytest.raises(InvalidArgumentError, match=text):
            PipelineParallel(Net(), group=world(), schedule=schedule)
    with pytest.raises(MismatchError, match=r"(?s)stages of each rank"):
        PipelineParallel(Net(), group=world(), schedule=("zb_v", "interleaved_1f1b")[rank])
    stage = PipelineParallel(Net(), group=world(), schedule=("1f1b", "zb_h1")[rank])
    with pytest.raises(MismatchError, match=r"(?s)schedule '1f1b'.*schedule 'zb_h1'"):
        train_step_pipeline(stage, make_batches(), loss_fn=sum_loss)
    stage = PipelineParallel(Net(), group=world(), schedule="zb_v")
    with pytest.raises(InvalidArgumentError, match=r"has stages \(\(0,\), \(1,\)\) on its"):
        train_step_pipeline_1f1b(stage, make_batches(), None, None, None, loss_fn=sum_loss)
    with pytest.raises(InvalidArgumentError, match="8 layers"):
        PipelineParallel(Net(), group=world(), schedule=lambda p, m: interleaved_1f1b(p, m, 5))


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


@distributed_test(world_size=2)
def test_graphs_live_from_their_forward_to_their_backward():
    """No activation is kept longer than the schedule says."""
    NotedLayer.alive = alive = weakref.WeakSet()
    run, seen = Training.run, []

    def counted(training, task):
        run(training, task)
        gc.collect()
        seen.append(len(alive))

    gc.disable()
    for name in ("1f1b", "interleaved_1f1b", "zb_h1", "dualpipe_v"):
        schedule = SCHEDULES[name](2, COUNT)
        stage = split(NotedNet(schedule.num_stages), name)
        seen.clear()
        with patch.object(Training, "run", counted):
            train_step_pipeline(stage, make_batches())
        live = itertools.accumulate(ENDS[a.kind] for a in schedule.ranks[stage.rank])
        assert seen == [*live], name

"""Schedules of all kinds with all else that a pipeline does: wrappers, ties, forwards, profiles."""

import random
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from one_process import (
    Net,
    Wrapper,
    accumulate,
    build,
    require_same,
    split,
    sum_loss,
    token_batches,
    world,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from scaletorch.dist import InvalidArgumentError, MismatchError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pipeline_parallel import (
    SCHEDULES,
    PipelineParallel,
    ScheduleError,
    check,
    interleaved_1f1b,
    pipeline_forward,
    train_step_pipeline,
    train_step_pipeline_1f1b,
    zb_h1,
    zb_v,
)

WIDTH, COUNT = 4, 5


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(self.norm(x)).tanh()


class Stack(Net):
    layer = Layer


class Recomputed(Layer):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class RecomputedStack(Stack):
    """A weight is in the embedding, in layers of the middle and in the head."""

    layer = Recomputed

    def __init__(self):
        super().__init__(tied=True)
        for layer in (self.layers[1], self.layers[4]):
            layer.linear.weight = self.embed.weight


def make_batches(count=COUNT):
    return token_batches(count)


def train_and_compare(model, plain):
    """Train a step more, and compare gradients with those of one process that does so too."""
    train_step_pipeline(model, make_batches(), loss_fn=sum_loss)
    accumulate(plain, make_batches())
    require_same(model, plain)


@contextmanager
def noted_actions():
    """Note the ranges that a profiler would show."""
    noted = []

    def note(name):
        noted.append(name)
        return nullcontext()

    with patch.object(torch.profiler, "record_function", note):
        yield noted


def all_at_once(names):
    for name in names:
        wrapped_and_tied(name)


def wrapped_and_tied(name):
    plain = build(RecomputedStack)
    wrapper = Wrapper(split(plain, name))
    pipeline = wrapper.module
    for _ in range(2):
        train_and_compare(wrapper, plain)
    schedule = SCHEDULES[name](world().size(), COUNT)
    own = schedule.ranks[pipeline.rank]
    backwards = sum(action.kind != "F" for action in own)
    assert wrapper.synced == 2 * [*[False] * (backwards - 1), True]
    wrapper.require_backward_grad_sync = False
    with noted_actions() as actions:
        train_step_pipeline(wrapper, make_batches(), loss_fn=sum_loss)
    assert wrapper.synced[2 * backwards :] == [False] * backwards
    assert actions == [f"{a} of stage {pipeline.stages[a.chunk]}" for a in own]
    outputs = pipeline_forward(wrapper, make_batches())
    assert len(outputs) == (COUNT if pipeline.is_last_stage else 0)
    for output, batch in zip(outputs, make_batches(), strict=False):
        assert torch.equal(output, plain(batch["input_ids"]))


@pytest.mark.parametrize(
    ("world_size", "names"),
    [(2, ["1f1b", "zb_h1"]), (3, ["dualpipe_v"]), (4, ["interleaved_1f1b"])],
)
def test_wrapped_recomputed_tied_and_profiled(world_size, names):
    run_ranks(all_at_once, world_size, names)


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
        plain = build(Stack)
        mine = shuffled(builder(world().size(), COUNT), seed)
        assert mine.ranks != builder(world().size(), COUNT).ranks
        stage = split(plain, mine)
        for _ in range(2):
            train_and_compare(stage, plain)
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
            PipelineParallel(Stack(), group=world(), schedule=schedule)
    with pytest.raises(MismatchError, match=r"(?s)stages of each rank"):
        PipelineParallel(Stack(), group=world(), schedule=("zb_v", "interleaved_1f1b")[rank])
    stage = PipelineParallel(Stack(), group=world(), schedule=("1f1b", "zb_h1")[rank])
    with pytest.raises(MismatchError, match=r"(?s)schedule '1f1b'.*schedule 'zb_h1'"):
        train_step_pipeline(stage, make_batches(), loss_fn=sum_loss)
    stage = PipelineParallel(Stack(), group=world(), schedule="zb_v")
    with pytest.raises(InvalidArgumentError, match=r"has stages \(\(0,\), \(1,\)\) on its"):
        train_step_pipeline_1f1b(stage, make_batches(), None, None, None, loss_fn=sum_loss)
    with pytest.raises(InvalidArgumentError, match="8 layers"):
        PipelineParallel(Stack(), group=world(), schedule=lambda p, m: interleaved_1f1b(p, m, 5))


@distributed_test(world_size=2)
def test_a_schedule_that_splits_backwards_for_some_numbers_of_micro_batches():
    """The example that is tried before the cut need not show it."""
    plain = build(Stack)

    def builder(num_ranks, num_micro_batches):
        few = num_micro_batches > COUNT - 1 and num_micro_batches < 4 * num_ranks
        return (zb_h1 if few else SCHEDULES["1f1b"])(num_ranks, num_micro_batches)

    stage = split(plain, builder)
    train_and_compare(stage, plain)

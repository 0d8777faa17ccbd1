"""Layers that run in a loop, on a stage that is named; what is frozen and named nowhere."""

import one_process
import pytest
import torch
from one_process import build, forward_everywhere, pair, same_steps, split
from torch import nn

from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pipeline_parallel import (
    PipelineParallel,
    Split,
    StageError,
    train_step_pipeline,
)

WIDTH, VOCAB, LENGTH = 8, 13, 6


class Net(one_process.Net):
    num_layers, width, vocabulary = 5, WIDTH, VOCAB

    def layer(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Looped(Net):
    """Its second and third layer run three times, each on what the first has returned too."""

    def run(self, x):
        first = x = self.layers[0](x)
        for _ in range(self.times(x)):
            x = 0.5 * x + first
            for layer in self.layers[1:3]:
                x = layer(x)
        for layer in self.layers[3:]:
            x = layer(x)
        return x

    def times(self, x):
        return 3


class OfLength(Looped):
    """How often its layers run differs by micro-batch."""

    def times(self, x):
        return 1 + x.shape[1] % 3


class Patched(Net):
    """What a frozen module says of the ids decides what all stages do."""

    def __init__(self):
        super().__init__(4)
        self.patcher = nn.Embedding(VOCAB, 1).requires_grad_(False)
        self.others = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, input_ids):
        patches = 1 + int(self.patcher(input_ids).detach().sum().abs()) % 3
        x = self.embed(input_ids) * patches
        for layer in (*self.layers, *self.others):
            x = layer(x) + patches
        return self.head(x)


class Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layers):
        for layer in layers:
            x = layer(x)
        ctx.layers = layers
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class OfReversible(Net):
    def run(self, x):
        return Reversible.apply(x, self.layers)


def make_batches():
    generator = torch.Generator().manual_seed(1)
    batches = []
    for extra in range(4):
        tokens = torch.randint(VOCAB, (2, LENGTH + 1 + extra % 3), generator=generator)
        batches.append({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]})
    return batches


def as_one_process(cases):
    for kind, points in cases:
        plain, stage = pair(kind, points=points)
        same_steps(plain, stage, make_batches(), atol=1e-15)
        assert all(p.grad.count_nonzero() for p in stage.parameters() if p.requires_grad)
        with torch.no_grad():
            outputs = [plain(batch["input_ids"]) for batch in make_batches()]
        found = forward_everywhere(stage, make_batches())
        torch.testing.assert_close(found, outputs, rtol=1e-12, atol=1e-14)


def test_a_stage_may_begin_before_a_loop_and_have_a_layer_behind_it():
    cases = [(kind, Split(points=(point,)))
             for kind in (Looped, OfLength) for point in ("layers.1", "layers.4")]  # fmt: skip
    run_ranks(as_one_process, 2, cases)


@distributed_test(world_size=2)
def test_what_no_stage_can_do_alone_is_refused():
    for kind, point, text in (
        (Looped, "layers.2", "comes back to it after modules of stage 1: .* or use no pipe"),
        (Looped, "layers.3", "calls it more than once; .* let the stage end after the loop"),
        (OfReversible, "layers.2", "not through the output of the last one .* reversible layers"),
    ):
        stage = split(build(kind), points=Split(points=(point,)))
        with pytest.raises((InvalidArgumentError, StageError), match=text):
            train_step_pipeline(stage, make_batches())


def test_what_is_frozen_and_named_nowhere_stays_on_every_stage():
    """And so its values are there, for code that reads them."""
    described = Split(first="embed", layers="layers", last=("others", "head"))
    run_ranks(as_one_process, 2, [(Patched, described)])
    trained = Patched()
    trained.patcher.requires_grad_(True)
    with pytest.raises(InvalidArgumentError, match=r"Split does not name .*: patcher"):
        PipelineParallel(trained, described)

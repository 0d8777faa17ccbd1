"""Backwards split in two give what one process gives, whatever the linear layers are."""

import copy
import pickle

import pytest
import torch
from one_process import Net, accumulate, build, pair, require_same, sum_loss, world
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.pipeline_parallel import PipelineParallel, train_step_pipeline
from scaletorch.parallel.pipeline_parallel.stages.weights import (
    Deferral,
    WeightGradients,
    defer_weight_gradients,
)

SPLIT = ["zb_h1", "zb_v", "dualpipe_v"]
WIDTH, COUNT = 6, 4


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Recomputed(Plain):
    reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class RecomputedReentrant(Recomputed):
    reentrant = True


class Frozen(Plain):
    """A weight that is not trained, and one that is the view of another."""

    def __init__(self):
        super().__init__()
        self.up.weight.requires_grad_(False)
        self.down.bias.requires_grad_(False)
        self.down.weight = nn.Parameter(torch.randn(3, WIDTH, 2 * WIDTH)[1].div(4))


class OwnForward(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 0.5


class Lora(nn.Module):
    """A frozen layer and low-rank factors, a forward of its own, a weight that is computed."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.own = OwnForward(WIDTH, WIDTH)
        self.normed = weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        x = self.base(input=x) + self.b(input=self.a(x))
        return x + self.normed(self.own(x).tanh())


class Twice(Plain):
    """Layers used twice, on rows, on a matrix, and on a vector."""

    def forward(self, x):
        x = super().forward(super().forward(x))
        first = self.down(self.up(x[0, 0]).tanh())
        return x + super().forward(x.flatten(0, 1)).view_as(x) + first


KINDS = [Plain, Recomputed, RecomputedReentrant, Frozen, Lora, Twice]


class OfLayers(Net):
    width, vocabulary = WIDTH, 5

    def __init__(self, kind, shared=False):
        self.layer = kind
        super().__init__()
        if shared:
            self.layers[7].down.weight = self.layers[6].down.weight

    def make(self):
        self.embed = nn.Linear(3, WIDTH, bias=False)  # its inputs need no gradient


def make_batches():
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randn(2, 4, 3, generator=generator, dtype=torch.float64),
            "labels": torch.randint(5, (2, 4), generator=generator),
        }
        for _ in range(COUNT)
    ]


@distributed_test(world_size=2)
def test_every_kind_of_layer():
    """Two steps that accumulate, of every kind of layer; each schedule has two kinds."""
    for schedule, kind in zip(2 * SPLIT, KINDS, strict=True):
        plain, stage = pair(OfLayers, kind, shared=kind is Plain, schedule=schedule)
        for _ in range(2):
            train_step_pipeline(stage, make_batches(), loss_fn=sum_loss)
            accumulate(plain, make_batches())
            require_same(stage, plain, exact=kind is Plain, atol=1e-13)


@distributed_test(world_size=2)
def test_hooks_run_once():
    """Hooks see each gradient once for each micro-batch, whole, and may change it."""
    for schedule in SPLIT:
        plain, stage = pair(OfLayers, Plain, schedule=schedule)
        added = dict.fromkeys((name for name, _ in stage.named_parameters()), 0)

        def count(name, parameter, added=added):
            assert parameter.grad is not None
            added[name] += 1

        for name, parameter in stage.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, n=name, c=count: c(n, p))
        for parameter in (*plain.parameters(), *stage.parameters()):
            parameter.register_hook(lambda gradient: gradient.mul(3).clamp(-1, 1))
        train_step_pipeline(stage, make_batches(), loss_fn=sum_loss)
        accumulate(plain, make_batches())
        assert added == dict.fromkeys(added, COUNT)
        require_same(stage, plain)


@distributed_test(world_size=2)
def test_a_copy_trains_on_its_own():
    plain, stage = pair(OfLayers, Plain, schedule="zb_v")
    train_step_pipeline(stage, make_batches(), loss_fn=sum_loss)
    for layers in (
        copy.deepcopy(stage.module.layers),
        pickle.loads(pickle.dumps(stage.module.head)),
    ):
        linear = next(m for m in [*layers.modules(), nn.Linear(3, 5)] if isinstance(m, nn.Linear))
        linear.zero_grad()
        linear(torch.ones(linear.in_features, dtype=linear.weight.dtype)).sum().backward()
        assert torch.equal(linear.weight.grad, torch.ones_like(linear.weight))
    accumulate(plain, make_batches())
    require_same(stage, plain, exact=True)


def test_weights_that_change_under_a_step():
    """A weight that is changed between forward and backward is refused, as by autograd."""
    stage = PipelineParallel(build(OfLayers, Plain), schedule="zb_h1")

    def loss_fn(output, batch):
        with torch.no_grad():
            stage.module.layers[0].up.weight.mul_(2)
        return sum_loss(output, batch)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train_step_pipeline(stage, make_batches(), loss_fn=loss_fn)


@distributed_test(world_size=2)
def test_types_of_spmd_types():
    """A layer whose weight gradient is postponed has the type of a product."""
    types, checker = pytest.importorskip("spmd_types"), pytest.importorskip("spmd_types.checker")
    layer, deferral = nn.Linear(3, 5), Deferral()
    defer_weight_gradients(layer, deferral)
    with checker.typecheck(local=True), deferral.to(WeightGradients()):
        for parameter in layer.parameters():
            types.assert_type(parameter, {world(): types.R})
        for kind in (types.R, types.V):
            x = torch.randn(2, 3)
            types.assert_type(x, {world(): kind})
            assert [*types.get_local_type(layer(x)).values()] == [kind]

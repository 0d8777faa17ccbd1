"""Backwards in two parts give what one process gives, whatever the linear layers are."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pipeline_parallel import PipelineParallel, train_step_pipeline

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


class Net(nn.Module):
    def __init__(self, kind, shared=False):
        super().__init__()
        self.embed = nn.Linear(3, WIDTH, bias=False)  # its inputs need no gradient
        self.layers = nn.ModuleList(kind() for _ in range(8))
        self.head = nn.Linear(WIDTH, 5, bias=False)
        if shared:
            self.layers[7].down.weight = self.layers[6].down.weight

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_batches():
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randn(2, 4, 3, generator=generator, dtype=torch.float64),
            "labels": torch.randint(5, (2, 4), generator=generator),
        }
        for _ in range(COUNT)
    ]


def sum_loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def serial(model, batches):
    for batch in batches:
        sum_loss(model(batch["input_ids"]), batch).backward()
    return dict(model.named_parameters(remove_duplicate=False))


def make(kind, **options):
    torch.manual_seed(0)
    plain = Net(kind, **options).double()
    return plain, copy.deepcopy(plain)


def world():
    return torch.distributed.group.WORLD


def compare(schedule):
    """Two steps that accumulate, of every kind of layer."""
    for kind in KINDS:
        plain, model = make(kind, shared=kind is Plain)
        stage = PipelineParallel(model, group=world(), schedule=schedule)
        for _ in range(2):
            train_step_pipeline(stage, make_batches(), loss_fn=sum_loss)
            references = serial(plain, make_batches())
            for name, parameter in stage.named_parameters():
                expected = references[name].grad
                assert (parameter.grad is None) == (expected is None), name
                if expected is not None and kind is Plain:
                    assert torch.equal(parameter.grad, expected), (kind, name)
                elif expected is not None:
                    torch.testing.assert_close(parameter.grad, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("schedule", SPLIT)
def test_every_kind_of_layer(schedule):
    run_ranks(compare, 2, schedule)


def hooks(schedule):
    """Hooks see each gradient once for each micro-batch, whole, and may change it."""
    plain, model = make(Plain)
    stage = PipelineParallel(model, group=world(), schedule=schedule)
    references = dict(plain.named_parameters())
    added = {}

    def count(name, parameter):
        assert parameter.grad is not None
        added[name] += 1

    for module in (plain, stage):
        for name, parameter in module.named_parameters():
            if module is stage:
                added[name] = 0
                parameter.register_post_accumulate_grad_hook(lambda p, n=name: count(n, p))
            parameter.register_hook(lambda gradient: gradient.mul(3).clamp(-1, 1))
    train_step_pipeline(stage, make_batches(), loss_fn=sum_loss)
    serial(plain, make_batches())
    assert added == dict.fromkeys(added, COUNT)
    for name, parameter in stage.named_parameters():
        torch.testing.assert_close(parameter.grad, references[name].grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("schedule", SPLIT)
def test_hooks_run_once(schedule):
    run_ranks(hooks, 2, schedule)


def autocast(schedule):
    """Return the errors of gradients under autocast, of one process and of a pipeline."""
    plain, model = make(Plain)
    exact = {name: p.grad for name, p in serial(copy.deepcopy(plain), make_batches()).items()}
    stage = PipelineParallel(model.float(), group=world(), schedule=schedule)
    batches = [{**b, "input_ids": b["input_ids"].float()} for b in make_batches()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        references = serial(plain.float(), batches)
        train_step_pipeline(stage, batches, loss_fn=sum_loss)
    errors = []
    for name, parameter in stage.named_parameters():
        assert parameter.grad.dtype == torch.float32
        pair = references[name].grad, parameter.grad
        errors.append([((p - exact[name]).norm() / exact[name].norm()).item() for p in pair])
    return errors


@pytest.mark.parametrize("schedule", ["1f1b", *SPLIT])
def test_autocast_is_as_precise_as_in_one_process(schedule):
    errors = torch.tensor([pair for rank in run_ranks(autocast, 2, schedule) for pair in rank])
    one, pipeline = errors.T
    assert pipeline.max() < 0.05
    assert pipeline.mean() < 1.05 * one.mean()
    if schedule == "1f1b":
        assert torch.equal(one, pipeline)


def kept_alive():
    """After a step nothing of it is alive; a copy of the model trains on its own."""
    _, model = make(Plain)
    stage = PipelineParallel(model, group=world(), schedule="zb_v")
    made = []
    for layer in stage.module.layers:
        layer.register_forward_hook(lambda module, args, out: made.append(weakref.ref(out)))
    gc.disable()
    train_step_pipeline(stage, make_batches(), loss_fn=sum_loss)
    assert len(made) > 2 * COUNT
    assert not any(reference() is not None for reference in made)
    for layers in (copy.deepcopy(stage.module.layers), pickle.loads(_pickled(stage.module.head))):
        linear = next(m for m in [*layers.modules(), nn.Linear(3, 5)] if isinstance(m, nn.Linear))
        linear.zero_grad()
        linear(torch.ones(linear.in_features, dtype=linear.weight.dtype)).sum().backward()
        assert torch.equal(linear.weight.grad, torch.ones_like(linear.weight))
    return {n: p.grad for n, p in stage.named_parameters()}


def _pickled(module):
    return pickle.dumps(module)


def test_nothing_is_kept_and_copies_are_apart():
    plain, _ = make(Plain)
    references = serial(plain, make_batches())
    for gradients in run_ranks(kept_alive, 2):
        for name, gradient in gradients.items():
            assert torch.equal(gradient, references[name].grad), name


def changed_in_between():
    """A weight that is changed between forward and backward is refused, as by autograd."""
    _, model = make(Plain)
    stage = PipelineParallel(model, schedule="zb_h1")

    def loss_fn(output, batch):
        with torch.no_grad():
            stage.module.layers[0].up.weight.mul_(2)
        return sum_loss(output, batch)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train_step_pipeline(stage, make_batches(), loss_fn=loss_fn)


def test_weights_that_change_under_a_step():
    run_ranks(changed_in_between, 1)

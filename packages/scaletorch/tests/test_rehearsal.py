"""A rehearsal agrees with one process where a layout is right, and else names the place.

`Everything` has what was once taken for a fault; each of `FAULTS` is planted on all its layouts.
"""

import copy
import random
import re
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from mutants.patch import patched
from refusals import models
from refusals.layouts import LAYOUTS, SHARED, Layout
from refusals.rows import batch
from torch import nn

from scaletorch.compose import (
    full_gradients,
    full_state_dict,
    parallelize,
    rehearse,
    shard_global_batch,
    train_step,
)
from scaletorch.dist.errors import RehearsalError, StateError
from scaletorch.dist.testing import RankPool, relative_error, run_ranks
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)


class Layer(models.NormedLayer):
    """Norms of heads, a scale within the MLP, and dropout."""

    feed_forward = models.ScaledMLP

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return super().forward(F.dropout(self.drop(x), 0.3, self.training))


class Everything(models.Plain):
    """Layers that are called several times, frozen parts, a gain behind the head."""

    layer = Layer

    def __init__(self, depth):
        super().__init__(depth)
        self.layers = nn.ModuleList([*self.layers, *self.layers])
        self.layers[0].mlp.up_proj.weight.requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(0.8))

    def top(self, x):
        return super().top(x) * self.gain


class FeatureMLP(models.MLP):
    def inner(self, x):
        x = super().inner(x)
        return x * x.softmax(-1)


class FeatureLayer(models.Layer):
    feed_forward = FeatureMLP


class Features(models.Plain):
    """Each rank has the softmax of its own features."""

    layer = FeatureLayer


class RowLayer(models.Layer):
    def forward(self, x):
        return super().forward(x - 0.1 * x.mean(0))


class Rows(models.Plain):
    """Each rank, and each micro-batch, has the mean of its own rows."""

    layer = RowLayer


def halved(backward):
    def half(self, *args):
        gradient = backward(self, *args)
        return gradient if gradient is None else gradient / 2

    return half


BOUNDARY = "parallel.pipeline_parallel.stages.stage:PipelineParallel.backward"
SUMS = "compose.partial_gradients:_sum"
# Of an axis: the model, a fault of the library, and what the message names.
FAULTS = {
    "tp": (Features, None, r"output of layers\.0 is off by"),
    "sums": (
        models.Normed,
        (SUMS, lambda _: lambda *_: None),
        r"gradient of layers\.\d\.self_attn",
    ),
    "dp": (Rows, None, r"output of layers\.0 is off by"),
    "cp": (models.Conv, None, r"output of layers\.0 is off by .*mix positions by F\.scaled"),
    "pp": (models.Plain, (BOUNDARY, halved), r"gradient that comes back to layers\.\d+ is off by"),
}


def prepared(kind, layout, dtype=torch.float64, **options):
    manager = setup_process_group_manager(**layout.sizes)
    torch.manual_seed(0)
    net = kind(layout.depth).to(dtype)
    for layer in net.layers if layout.compiled else ():
        layer.compile(backend="eager")
    plan = {"plan": models.PLAN} if manager.tp_size > 1 else {}
    model = parallelize(net, manager, **{**plan, **layout.options, **options, "rehearse": True})
    if layout.zero:
        shard_optimizer(torch.optim.SGD(model.parameters(), 0.1), model, stage=layout.zero)
    return model, shard_global_batch(batch(0), layout.micro_batches, model=model)


def told(kind, layout, dtype=torch.float64, fault=None):
    """Return what a rehearsal raises on this rank."""
    torch._dynamo.reset() if layout.compiled else None
    try:
        with patched(*fault) if fault else nullcontext():
            model, micro_batches = prepared(kind, layout, dtype)
            rehearse(model, micro_batches)
        return None
    except RehearsalError as error:
        return str(error)
    finally:
        destroy_process_group_manager()


def planted(axis, layout):
    kind, fault, _ = FAULTS[axis]
    return told(kind, layout, fault=fault)


def axes_of(layout):
    sizes = layout.axes
    found = [axis for axis in ("tp", "cp", "pp") if sizes.get(axis, 1) > 1]
    found += ["sums"] * ("tp" in found)
    return found + ["dp"] * (sizes.get("dp", 1) > 1 or layout.micro_batches > 1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 4])
def test_right_layouts_agree_and_faults_are_named(ranks):
    mistakes = []
    with RankPool(ranks, timeout=100) as pool:
        for layout in [each for each in LAYOUTS if each.ranks == ranks]:
            alarm = {said for said in pool.run(told, Everything, layout) if said}
            mistakes += [f"{layout}: {said}" for said in alarm]
            axes = axes_of(layout)
            for axis in axes if ranks == 2 else axes[-1:]:
                for said in pool.run(planted, axis, layout):
                    if not re.search(FAULTS[axis][2], said or "", re.DOTALL):
                        mistakes.append(f"{axis} on {layout}: {said}")
    assert not mistakes, "\n".join(mistakes)


COARSE = [Layout({"tp": 2}, SHARED), Layout({"cp": 2}), Layout({"dp": 2}, micro_batches=2)]


def in_dtypes():
    for dtype in (torch.float32, torch.bfloat16):
        for axis, layout in zip(("sums", "cp", "dp"), COARSE, strict=True):
            assert told(Everything, layout, dtype) is None, (dtype, layout)
            kind, fault, words = FAULTS[axis]
            said = told(kind, layout, dtype, fault)
            if dtype == torch.bfloat16:  # a later tensor may be the first that stands out
                words = "computes something else"
            assert re.search(words, said or "", re.DOTALL), (axis, dtype, said)


def test_coarse_dtypes_give_no_alarm_and_hide_no_fault():
    run_ranks(in_dtypes, 2, timeout=100)


def unchanged():
    """A rehearsal leaves everything as it was, and training is what it is without one."""
    model, micro_batches = prepared(models.FrozenNorm, Layout({"tp": 2, "dp": 2}))
    before = copy.deepcopy(full_state_dict(model)), torch.get_rng_state(), random.getstate()
    rehearse(model, micro_batches)
    assert all(torch.equal(x, before[0][n]) for n, x in full_state_dict(model).items())
    assert torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == before[2]
    assert all(p.grad is None for p in model.parameters())
    destroy_process_group_manager()


def test_everything_is_as_it_was():
    run_ranks(unchanged, 4, timeout=100)


class Noisy(models.Layer):
    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


class OneIsNoisy(models.Plain):
    def __init__(self, depth):
        super().__init__(depth)
        self.layers[0].__class__ = Noisy


class Reaches(models.Plain):
    """The root uses weights of its layers itself."""

    def top(self, x):
        return super().top(x + self.layers[0].norm1.weight)


def hooks_and_penalties():
    """What is registered, or read, of the model later is the model's own."""
    model, micro_batches = prepared(models.Plain, Layout({"dp": 2}))
    model.module.module.layers[0].register_forward_hook(lambda _m, _i, x: x * 1.5)

    def loss_fn(output, micro_batch):
        labels = micro_batch["labels"]
        count = int((labels != -100).sum())
        total = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
        return total + count * 0.1 * sum(p.square().sum() for p in model.parameters()), count

    rehearse(model, micro_batches, loss_fn=loss_fn)
    train_step(model, micro_batches, loss_fn=loss_fn)
    with pytest.raises(StateError, match="a rehearsal has gradients of its own"):
        rehearse(model, micro_batches, loss_fn=loss_fn)
    destroy_process_group_manager()
    manager = setup_process_group_manager(dp_size=2)
    model = parallelize(models.Plain(2), manager)
    with pytest.raises(StateError, match=r"parallelize\(\.\.\., rehearse=True\) keeps"):
        rehearse(model, shard_global_batch(batch(0), 1, model=model))


def test_later_hooks_and_penalties_are_no_alarm():
    run_ranks(hooks_and_penalties, 2, timeout=100)


def lines(kind, layout):
    found = []
    with patched("compose.rehearsal.rehearse:_write", lambda _: found.append):
        assert told(kind, layout) is None
    return found


def test_the_line_says_what_was_compared_and_what_was_not():
    with RankPool(2, timeout=100) as pool:
        for layout in (Layout({"tp": 2}), Layout({"dp": 2})):
            (line,), none = pool.run(lines, models.Plain, layout)
            assert re.match(r"rehearsal: 2 units on \S+ agree with one process to \S+e-1\d,", line)
            assert none == []
            (line,), _ = pool.run(lines, OneIsNoisy, layout)
            assert "not compared: layers.0, which gives another answer each time" in line
            (line,), _ = pool.run(lines, Reaches, layout)
            assert "rehearsal: 0 units" in line


def trained(axis):
    """The first train_step rehearses by itself, once."""
    model, micro_batches = prepared(FAULTS[axis][0], Layout({"tp": 2}))
    with pytest.raises(RehearsalError, match="rehearse=False"):
        train_step(model, micro_batches)
    assert all(p.grad is None for p in model.parameters())
    destroy_process_group_manager()
    model, micro_batches = prepared(models.Plain, Layout({"tp": 2}))
    train_step(model, micro_batches)
    torch.manual_seed(0)
    net = models.Plain(2).double()
    whole = batch(0)
    logits = net(whole["input_ids"])
    F.cross_entropy(logits.flatten(0, 1), whole["labels"].flatten()).backward()
    found = full_gradients(model)
    for name, parameter in net.named_parameters():
        assert relative_error(found[name], parameter.grad) < 1e-12, name
    destroy_process_group_manager()


def test_the_first_step_rehearses():
    run_ranks(trained, 2, "tp", timeout=100)

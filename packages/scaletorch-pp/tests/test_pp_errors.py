"""Mistakes and disagreements are errors on every rank, with both sides, and never a hang."""

import copy
import gc
import weakref

import pytest
import torch
from one_process import world
from torch import nn

from scaletorch.dist import InvalidArgumentError, MismatchError, RankFailedError, StateError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pipeline_parallel import (
    PassThrough,
    PipelineParallel,
    Split,
    train_step_pipeline_1f1b,
    train_step_pipeline_afab,
)
from scaletorch.parallel.pipeline_parallel.steps.batches import MicroBatches

SHAPE = (2, 3, 4)


class Net(nn.Module):
    """``before`` and ``after`` stand for code of the model's own around its layers."""

    def __init__(self, num_layers=4, before=None, after=None):
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_layers))
        self.head = nn.Linear(4, 4)
        self.before, self.after = before, after

    def forward(self, input_ids):
        x = self.embed(input_ids)
        x = x if self.before is None else self.before(x)
        for layer in self.layers:
            x = layer(x)
        x = x if self.after is None else self.after(x)
        return self.head(x)


def rank():
    return torch.distributed.get_rank()


def make_batches(count=2):
    ids = torch.zeros(SHAPE[:2], dtype=torch.int64)
    return [{"input_ids": ids, "labels": ids} for _ in range(count)]


def step(model, batches=None, shape=SHAPE, dtype=torch.float32, schedule=None, **options):
    call = schedule or train_step_pipeline_1f1b
    return call(model, make_batches() if batches is None else batches, shape, "cpu", dtype,
                **options)  # fmt: skip


@distributed_test(world_size=2)
def test_models_and_splits_that_differ():
    smaller, tied = Net(), Net()
    if rank() == 1:
        smaller.layers[2] = nn.Linear(4, 4, bias=False)
        tied.head.weight = tied.embed.weight
    text = r"disagree on the model .*\nrank 1 \(\+\), rank 0 \(-\):\n  - parameter layers.2.bias of"
    with pytest.raises(MismatchError, match=text):
        PipelineParallel(smaller, group=world())
    with pytest.raises(MismatchError, match=r"\n  \+ parameter head.weight .* tied to embed"):
        PipelineParallel(tied, group=world())
    names = ("embed", "embedding")[rank()]
    kinds = (MismatchError, InvalidArgumentError)
    with pytest.raises(kinds[rank()], match="Split names 'embedding', which the model"):
        PipelineParallel(Net(), Split((names,), "layers", ("head",)), world())
    with pytest.raises(StateError, match="pass group="):
        PipelineParallel(Net())


@distributed_test(world_size=3)
def test_the_rank_that_differs_and_more_stages_than_layers():
    last = ("head",) if rank() < 2 else ()
    first = ("embed",) if rank() < 2 else ("embed", "head")
    with pytest.raises(MismatchError, match=r"(?s)rank 2 \(\+\).*- Split\(first=\('embed',\), "):
        PipelineParallel(Net(), Split(first, "layers", last), world())
    with pytest.raises(InvalidArgumentError, match=r"2 layers .* 3 stages: .* from 1 to 2"):
        PipelineParallel(Net(num_layers=2), group=world())


@distributed_test(world_size=2)
def test_stages_that_disagree_about_a_step():
    stage = PipelineParallel(Net(), group=world())
    cases = [
        (
            {"batches": make_batches(2 + rank())},
            r"(?s)rank 1 \(\+\), rank 0 \(-\):\n  - 2 micro-batches\n  \+ 3 micro",
        ),
        (
            {"shape": (2, 3, 4 + rank())},
            r"(?s)- hidden states \(2, 3, 4\) .*\+ hidden states \(2, 3, 5\) of",
        ),
        (
            {"dtype": (torch.float32, torch.float64)[rank()]},
            r"(?s)of torch\.float32.*torch\.float64",
        ),
        (
            {"schedule": (train_step_pipeline_1f1b, train_step_pipeline_afab)[rank()]},
            "(?s)1f1b.*afab",
        ),
    ]
    for options, text in cases:
        with pytest.raises(MismatchError, match=text):
            step(stage, **options)
    alone = [torch.distributed.new_group([r]) for r in range(2)][rank()]
    with pytest.raises(InvalidArgumentError, match=r"are ranks \(0, 1\) and .* has ranks \(\d,\)"):
        step(stage, group=alone)
    with pytest.raises((MismatchError, OSError)[rank()], match="disk on fire"):
        step(stage, failing_loader())
    unlabelled = [{"input_ids": batch["input_ids"]} for batch in make_batches()]
    bad = [*make_batches(1), {**make_batches(1)[0], "labels": None}]
    for batches, text in ((unlabelled, "has no labels, only"), (bad, r"\[B, L\], got NoneType")):
        with pytest.raises((MismatchError, InvalidArgumentError)[rank()], match=text):
            step(stage, batches)
    step(stage)  # nothing is left over from the failed ones


def failing_loader():
    yield make_batches(1)[0]
    if rank() == 1:
        raise OSError("disk on fire")
    yield make_batches(1)[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batches": []}, "has no micro-batches"),
        ({"batches": [torch.zeros(2)]}, "must be a mapping, got Tensor"),
        ({"batches": [{"labels": 1}]}, r"has no input_ids, only \['labels'\]"),
        ({"shape": "abc"}, "got 'abc'"),
        ({"shape": (2, -3, 4)}, r"got \(2, -3, 4\)"),
        ({"dtype": torch.int32}, r"got torch\.int32"),
        ({"loss_fn": lambda output, batch: output}, r"got a tensor of shape \(2, 3, 4\) with"),
        ({"loss_fn": lambda output, batch: output.sum().detach()}, "requires_grad=False"),
        ({"loss_fn": lambda output, batch: 1.0}, "got a float"),
        ({"batches": [{"input_ids": torch.zeros(2, 3).long(), "labels": torch.zeros(2).long()}]},
         r"labels of shape \(2,\) do not fit an output of shape \(2, 3, 4\)"),
    ],
)  # fmt: skip
def test_bad_arguments(options, text):
    with pytest.raises(InvalidArgumentError, match=text):
        step(PipelineParallel(Net()), **options)


def test_models_that_are_no_pipeline():
    with pytest.raises(InvalidArgumentError, match=r"a PipelineParallel, or wrappers .* got Net"):
        step(Net())
    with torch.no_grad(), pytest.raises(StateError, match="needs gradients"):
        step(PipelineParallel(Net()))


@pytest.mark.parametrize(
    ("device", "announced"), [("cpu", (None, torch.float64)), ("meta", (SHAPE, torch.float32))]
)
def test_outputs_that_the_next_stage_does_not_expect(device, announced):
    text = r"next stage expects .* has shape \(2, 3, 4\), torch\.float32, on cpu; pass"
    with pytest.raises(InvalidArgumentError, match=text):
        MicroBatches([], torch.device(device), *announced).checked(torch.zeros(SHAPE))


def expects_another_shape():
    step(PipelineParallel(Net(), group=world()), shape=(2, 3, 5))


def test_an_unexpected_output_is_not_sent():
    with pytest.raises(RankFailedError, match=r"rank 0: the next stage expects .*\(2, 3, 5\)"):
        run_ranks(expects_another_shape, 2)


@distributed_test(world_size=3)
def test_code_around_the_layers_runs_on_the_first_and_the_last_stage():
    hidden = torch.randn(SHAPE, requires_grad=True)
    ids = torch.zeros(SHAPE[:2], dtype=torch.int64)
    torch.manual_seed(0)
    model = Net(num_layers=3)
    layers = copy.deepcopy(model.layers)
    embed, head = copy.deepcopy(model.embed), copy.deepcopy(model.head)
    model.before, model.after = (lambda x: x * 2), (lambda x: x.mul_(2))
    stage = PipelineParallel(model, group=world())
    output = stage(ids if rank() == 0 else hidden)
    expected = layers[rank()](embed(ids) * 2 if rank() == 0 else hidden)
    assert torch.equal(output, head(expected * 2) if rank() == 2 else expected)


@distributed_test(world_size=3)
def test_casts_views_and_torchs_own_layers_are_no_change():
    hidden = torch.randn(SHAPE, requires_grad=True)
    ids = torch.zeros(SHAPE[:2], dtype=torch.int64)
    for before, after in [
        (nn.Dropout(0.5), nn.LayerNorm(4, elementwise_affine=False)),
        (lambda x: x.double().float(), lambda x: x[:, slice(None), :]),
    ]:
        model = Net(num_layers=3)
        if isinstance(before, nn.Module):
            children = dict(model.named_children())
            del model.embed, model.layers, model.head, model.before, model.after
            model.embed, model.before = children["embed"], before
            model.layers, model.after, model.head = children["layers"], after, children["head"]
        else:
            model.before, model.after = before, after
        stage = PipelineParallel(model, group=world())
        stage(ids if rank() == 0 else hidden)


@distributed_test(world_size=2)
def test_a_layer_that_several_places_share():
    model = Net()
    for index in range(1, 4):
        model.layers[index] = model.layers[0]
    stage = PipelineParallel(model, group=world())
    assert stage.tied_parameters["layers.3.weight"] == (0, 1)
    step(stage)


def test_an_output_that_does_not_depend_on_the_input():
    stage = PipelineParallel(Net())
    hidden, output = torch.randn(SHAPE, requires_grad=True), torch.ones(2, requires_grad=True)
    assert torch.equal(stage.backward(hidden, output, torch.ones(2)), torch.zeros(SHAPE))
    assert stage.backward(None, torch.ones(2), torch.ones(2)) is None


@distributed_test(world_size=2)
def test_other_stages_are_freed():
    model = Net()
    watched = {name: weakref.ref(p) for name, p in model.named_parameters()}
    stage = PipelineParallel(model, group=world())
    gc.collect()
    assert stage.module is model
    kept = {name for name, reference in watched.items() if reference() is not None}
    first = {f"layers.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")} | {"embed.weight"}
    assert kept == (first if rank() == 0 else watched.keys() - first)
    assert set(stage.state_dict()) == kept
    assert isinstance(model.head, PassThrough) == (rank() == 0)
    with pytest.raises(AttributeError, match=r"is on stage \d of the pipeline"):
        _ = (model.head if rank() == 0 else model.embed).weight

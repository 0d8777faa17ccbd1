"""Mistakes and disagreements are errors on every rank, with both sides, and never a hang."""

import gc
import weakref

import pytest
import torch
from one_process import Net, world
from torch import nn

from scaletorch.dist import InvalidArgumentError, MismatchError, RankFailedError, StateError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pipeline_parallel import (
    PassThrough,
    PipelineParallel,
    Split,
    one_f_one_b,
    pipeline_forward,
    train_step_pipeline,
)

SHAPE = (2, 3, 4)


def rank():
    return torch.distributed.get_rank()


def make_batches(count=2):
    ids = torch.zeros(SHAPE[:2], dtype=torch.int64)
    return [{"input_ids": ids, "labels": ids} for _ in range(count)]


def step(model, batches=None, shape=SHAPE, dtype=torch.float32, **options):
    batches = make_batches() if batches is None else batches
    return train_step_pipeline(model, batches, shape, "cpu", dtype, **options)


@distributed_test(world_size=3)
def test_models_and_splits_that_differ():
    smaller, tied = Net(4), Net(4, tied=rank() == 2)
    if rank() == 2:
        smaller.layers[2] = nn.Linear(4, 4, bias=False)
    text = r"disagree on the model .*\nrank 2 \(\+\), .*\(-\):\n  - parameter layers.2.bias of"
    with pytest.raises(MismatchError, match=text):
        PipelineParallel(smaller, group=world())
    with pytest.raises(MismatchError, match=r"\n  \+ parameter head.weight .* tied to embed"):
        PipelineParallel(tied, group=world())
    first, last = (("embed",), ("head",)) if rank() < 2 else (("embed", "head"), ())
    with pytest.raises(MismatchError, match=r"(?s)rank 2 \(\+\).*- Split\(first=\('embed',\), "):
        PipelineParallel(Net(), Split(first, "layers", last), world())
    kind = InvalidArgumentError if rank() == 2 else MismatchError
    names = "embedding" if rank() == 2 else "embed"
    with pytest.raises(kind, match="Split names 'embedding', which the model"):
        PipelineParallel(Net(), Split(names, "layers", "head"), world())
    with pytest.raises(kind, match="got str"):
        PipelineParallel("model" if rank() == 2 else Net(), group=world())
    with pytest.raises(StateError, match="pass group="):
        PipelineParallel(Net())


def failing_loader():
    yield make_batches(1)[0]
    if rank() == 1:
        raise OSError("disk on fire")
    yield make_batches(1)[0]


def failing_schedule(num_ranks, num_micro_batches):
    if rank() == 1:
        raise ZeroDivisionError("no such schedule")
    return one_f_one_b(num_ranks, num_micro_batches)


@distributed_test(world_size=2)
def test_stages_that_disagree_about_a_step():
    stage = PipelineParallel(Net(4), group=world())
    cases = [
        ({"batches": make_batches(2 + rank())}, r"rank 1 .*- 2 micro-batches\n  \+ 3 micro"),
        ({"shape": (2, 3, 4 + rank())}, r"- hidden states \(2, 3, 4\) .*\+ hidden .* 5\) of"),
        ({"dtype": (torch.float32, torch.float64)[rank()]}, r"of torch\.float32.*torch\.float64"),
        ({"schedule": ("1f1b", "afab")[rank()]}, "1f1b.*afab"),
    ]
    for options, text in cases:
        with pytest.raises(MismatchError, match=f"(?s){text}"):
            step(stage, **options)
    with pytest.raises(MismatchError, match=r"(?s)these forwards.*2 micro.*1 micro"):
        pipeline_forward(stage, make_batches()[rank() :])
    alone = [torch.distributed.new_group([r]) for r in range(2)][rank()]
    with pytest.raises(InvalidArgumentError, match=r"are ranks \(0, 1\) and .* has ranks \(\d,\)"):
        step(stage, group=alone)
    with pytest.raises((MismatchError, OSError)[rank()], match="disk on fire"):
        step(stage, failing_loader())
    with pytest.raises((MismatchError, ZeroDivisionError)[rank()], match="no such schedule"):
        step(stage, schedule=failing_schedule)
    with torch.set_grad_enabled(rank() == 0):  # noqa: SIM117
        with pytest.raises((MismatchError, StateError)[rank()], match="needs gradients"):
            step(stage)
    unlabelled = [{"input_ids": batch["input_ids"]} for batch in make_batches()]
    bad = [*make_batches(1), {**make_batches(1)[0], "labels": None}]
    for batches, text in ((unlabelled, "has no labels, only"), (bad, r"\[B, L\], got NoneType")):
        with pytest.raises((MismatchError, InvalidArgumentError)[rank()], match=text):
            step(stage, batches)
    step(stage)  # nothing is left over from the failed ones


IDS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batches": []}, "has no micro-batches"),
        ({"batches": [torch.zeros(2)]}, "must be a mapping, got Tensor"),
        ({"batches": [{"labels": 1}]}, r"has no input_ids, only \['labels'\]"),
        ({"batches": [{"input_ids": IDS, "labels": torch.zeros(2).long()}]},
         r"labels of shape \(2,\) do not fit an output of shape \(2, 3, 4\)"),
        ({"batches": [{**make_batches()[0], "memory": torch.ones(1, requires_grad=True)}]},
         "memory of micro-batch 0 requires grad"),
        ({"shape": "abc"}, "got 'abc'"),
        ({"shape": (2, -3, 4)}, r"got \(2, -3, 4\)"),
        ({"dtype": torch.int32}, r"got torch\.int32"),
        ({"loss_fn": lambda output, batch: output}, r"got a tensor of shape \(2, 3, 4\) with"),
        ({"loss_fn": lambda output, batch: output.sum().detach()}, "requires_grad=False"),
        ({"loss_fn": lambda output, batch: 1.0}, "got a float"),
        ({"schedule": "forward_only"}, "'forward_only' has no backward"),
    ],
)  # fmt: skip
def test_bad_arguments(options, text):
    with pytest.raises(InvalidArgumentError, match=text):
        step(PipelineParallel(Net()), **options)


class Around(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def test_models_that_are_no_pipeline():
    for model, text in (
        (Net(), r"a PipelineParallel, or wrappers .* got Net"),
        (Around(PipelineParallel(Net())), r"Around around .* must have backward\("),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            step(model)


def announce(**announced):
    step(PipelineParallel(Net(4), group=world()), **announced)


@pytest.mark.parametrize("announced", [{"shape": (2, 3, 5)}, {"dtype": torch.float64}])
def test_an_unexpected_output_is_not_sent(announced):
    text = r"rank 0: the next stage expects .* has shape \(2, 3, 4\), torch\.float32, on cpu; pass"
    with pytest.raises(RankFailedError, match=text):
        run_ranks(announce, 2, **announced)


@distributed_test(world_size=2)
def test_other_stages_are_freed():
    model = Net(4)
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

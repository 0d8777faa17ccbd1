"""Mistakes, disagreements and stages that raise: errors on every rank that say why, and no hang."""

import gc
import weakref

import pytest
import torch
from one_process import (
    Layer,
    Net,
    build,
    forward_everywhere,
    pair,
    split,
    sum_loss,
    token_batches,
    trains_on,
    world,
)
from torch import nn

from scaletorch.dist import InvalidArgumentError, MismatchError, RankFailedError, StateError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pipeline_parallel import (
    PassThrough,
    PipelineParallel,
    Split,
    StageError,
    one_f_one_b,
    pipeline_forward,
    train_step_pipeline,
)

SHAPE = (2, 3, 4)


def rank():
    return torch.distributed.get_rank()


def zero_batches(count=2):
    ids = torch.zeros(SHAPE[:2], dtype=torch.int64)
    return [{"input_ids": ids, "labels": ids} for _ in range(count)]


def step(model, batches=None, shape=SHAPE, dtype=torch.float32, **options):
    batches = zero_batches() if batches is None else batches
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
    yield zero_batches(1)[0]
    if rank() == 1:
        raise OSError("disk on fire")
    yield zero_batches(1)[0]


def failing_schedule(num_ranks, num_micro_batches):
    if rank() == 1:
        raise ZeroDivisionError("no such schedule")
    return one_f_one_b(num_ranks, num_micro_batches)


@distributed_test(world_size=2)
def test_stages_that_disagree_about_a_step():
    stage = PipelineParallel(Net(4), group=world())
    cases = [
        ({"batches": zero_batches(2 + rank())}, r"rank 1 .*- 2 micro-batches\n  \+ 3 micro"),
        ({"shape": (2, 3, 4 + rank())}, r"- hidden states \(2, 3, 4\) .*\+ hidden .* 5\) of"),
        ({"dtype": (torch.float32, torch.float64)[rank()]}, r"of torch\.float32.*torch\.float64"),
        ({"schedule": ("1f1b", "afab")[rank()]}, "1f1b.*afab"),
    ]
    for options, text in cases:
        with pytest.raises(MismatchError, match=f"(?s){text}"):
            step(stage, **options)
    with pytest.raises(MismatchError, match=r"(?s)these forwards.*2 micro.*1 micro"):
        pipeline_forward(stage, zero_batches()[rank() :])
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
    unlabelled = [{"input_ids": batch["input_ids"]} for batch in zero_batches()]
    bad = [*zero_batches(1), {**zero_batches(1)[0], "labels": None}]
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
        ({"batches": [{**zero_batches()[0], "memory": torch.ones(1, requires_grad=True)}]},
         "memory of micro-batch 0 requires grad"),
        ({"shape": "abc"}, "got 'abc'"),
        ({"shape": (2, -3, 4)}, r"got \(2, -3, 4\)"),
        ({"dtype": torch.int32}, r"got torch\.int32"),
        ({"loss_fn": lambda output, batch: output}, r"got a tensor of \(2, 3, 4\) of torch"),
        ({"loss_fn": lambda output, batch: output.sum().detach()}, "without gradient"),
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


COUNT = 6


class Trap:
    """When set, raises for one micro-batch (the n-th that comes by) in forward or backward."""

    def __init__(self):
        self.spring(None)

    def spring(self, kind, after=0, error=ZeroDivisionError):
        self.kind, self.left, self.error = kind, after, error

    def __call__(self, kind):
        if self.kind == kind:
            self.left -= 1
            if self.left < 0:
                raise self.error(f"boom in {kind}")


class Trapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, trap):
        trap("forward")
        ctx.trap = trap
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.trap("backward")
        return gradient, None


class Trapping(Layer):
    def __init__(self):
        super().__init__()
        self.trap = Trap()

    def forward(self, x):
        return Trapped.apply(super().forward(x), self.trap)


class TrappedNet(Net):
    layer = Trapping


def make_batches(length=3):
    return token_batches(COUNT, length=length)


def failing_loss(output, batch):
    raise ZeroDivisionError("boom in loss")


def own_layer(stage):
    """The first layer that is here."""
    return next(layer for layer in stage.module.layers if isinstance(layer, Trapping))


def fail(stage, guilty, batches, loss_fn=sum_loss, text="boom in"):
    """Run a step in which these ranks raise what they find, and the others say what that was."""
    kinds = {(stage.rank,): [ZeroDivisionError]}.get(guilty, [StageError])
    if len(guilty) > 1 and stage.rank in guilty:  # whoever comes first
        kinds = [ZeroDivisionError, StageError]
    with pytest.raises(tuple(kinds), match=text) as raised:
        train_step_pipeline(stage, batches, loss_fn=loss_fn)
    if raised.type is StageError:
        places = "|".join(f"rank {rank}" for rank in guilty)
        assert raised.match(rf"({places}) failed in [FBIW]\d.*: ZeroDivisionError: boom in")
        assert raised.value.kind == "ZeroDivisionError"


def failures(schedule):
    plain, size = build(TrappedNet), world().size()
    stage = split(plain, schedule)
    last = next(r for r, own in enumerate(stage.all_stages) if stage.num_stages - 1 in own)
    trap = own_layer(stage).trap
    lengths = iter(range(2, 99))  # of which the form is known to nobody
    moments = [("forward", 0), ("forward", COUNT - 1), ("backward", COUNT - 1)]
    for index, guilty in enumerate([(0,), (1,), (size - 1,), (0, size - 1)]):
        for kind, after in moments[index % 2 :]:
            for batches in make_batches(length=next(lengths)), make_batches():
                if stage.rank in guilty:
                    trap.spring(kind, after)
                fail(stage, guilty, batches, text=f"boom in {kind}")
                trap.spring(None)
        trains_on(stage, plain, make_batches())
    fail(stage, (last,), make_batches(), failing_loss)
    fail(stage, (last,), make_batches(length=next(lengths)), failing_loss)
    trains_on(stage, plain, make_batches(length=next(lengths)))
    forwards(stage, plain, trap)
    trains_on(stage, plain, make_batches(length=3))


def forwards(stage, plain, trap):
    """Forwards alone, of a form that is not known and of one that is, fail as steps do."""
    for length in (77, 77, 3):
        if stage.rank == 1:
            trap.spring("forward", after=1)
        kind = ZeroDivisionError if stage.rank == 1 else StageError
        with pytest.raises(kind, match="boom in forward"):
            pipeline_forward(stage, make_batches(length=length))
        trap.spring(None)
        outputs = forward_everywhere(stage, make_batches(length=length))
        for output, batch in zip(outputs, make_batches(length=length), strict=True):
            assert torch.equal(output, plain(batch["input_ids"]))


# On 4 ranks, some of which are no neighbours of the guilty: with a stage a rank, and with two.
@pytest.mark.parametrize(("world_size", "schedule"), [(3, "afab"), (4, "1f1b"), (4, "zb_v")])
def test_every_rank_raises_and_trains_on(world_size, schedule):
    run_ranks(failures, world_size, schedule)


@distributed_test(world_size=3)
def test_a_failure_in_the_very_last_action():
    plain = build(TrappedNet)
    for schedule in ("1f1b", "zb_h1"):
        stage = split(plain, schedule)
        bias = stage.module.embed.weight if stage.is_first_stage else own_layer(stage).bias
        seen = []

        def last_of_all(parameter, seen=seen):
            seen.append(None)
            if len(seen) == COUNT:
                raise ZeroDivisionError("boom in hook")

        if stage.rank == 0:
            handle = bias.register_post_accumulate_grad_hook(last_of_all)
        fail(stage, (0,), make_batches())
        if stage.rank == 0:
            handle.remove()
        trains_on(stage, plain, make_batches())


class Odd(Exception):
    def __str__(self):
        return "boom \udcff"


@distributed_test(world_size=2)
def test_errors_whose_text_cannot_be_sent():
    plain, stage = pair(TrappedNet)
    own_layer(stage).trap.spring("forward" if stage.rank == 0 else None, error=Odd)
    kind, text = ((Odd, "boom"), (StageError, r"boom \\udcff"))[stage.rank]
    with pytest.raises(kind, match=text):
        train_step_pipeline(stage, make_batches(), loss_fn=sum_loss)
    own_layer(stage).trap.spring(None)
    trains_on(stage, plain, make_batches())


@distributed_test(world_size=2)
def test_what_follows_from_a_failure_says_so():
    """Zeros come from a rank that has failed; what they break elsewhere names it."""
    plain, stage = pair(TrappedNet)
    trains_on(stage, plain, make_batches())

    def loss_fn(output, batch):
        if (output[0, 0] == output[-1, -1]).all():
            raise ValueError("no two tokens are alike")
        return sum_loss(output, batch)

    ids = torch.arange(4).view(2, 2)
    batches = [{"input_ids": ids, "labels": ids}] * COUNT
    own_layer(stage).trap.spring("forward" if stage.rank == 0 else None, after=2)
    with pytest.raises((ZeroDivisionError, StageError, ValueError)) as raised:
        train_step_pipeline(stage, batches, loss_fn=loss_fn)
    if isinstance(raised.value, ValueError):
        assert raised.value.__notes__[0].startswith("Before that, rank 0 failed in F2 of this")
    own_layer(stage).trap.spring(None)
    trains_on(stage, plain, make_batches())

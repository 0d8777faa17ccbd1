"""A stage that raises: every rank raises and says why, and the model trains on."""

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

from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pipeline_parallel import StageError, pipeline_forward, train_step_pipeline

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

"""Parameters that several stages hold, and gradients that wrappers sum: each once, at the end."""

import pytest
import torch
import torch.nn.functional as F
from one_process import (
    Net,
    Wrapper,
    accumulate,
    build,
    require_same,
    split,
    sum_loss,
    trains_on,
    world,
)
from one_process import token_batches as make_batches
from torch import nn
from torch.distributed import get_rank, new_subgroups_by_enumeration

from scaletorch.dist.dist import all_gather, all_reduce
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.pg_manager import setup_process_group_manager
from scaletorch.parallel.pipeline_parallel import (
    PipelineParallel,
    Split,
    train_step_pipeline,
)


def make(num_layers=4, thrice=False, dtype=torch.float64):
    """Return a model whose embedding is its head too, and a layer of the middle."""
    model = build(Net, num_layers, tied=True)
    if thrice:
        model.layers[1].weight = model.embed.weight
    return model.to(dtype)


def step(stage, batches):
    train_step_pipeline(stage, batches, loss_fn=sum_loss)


def local(stage):
    """The tied parameter that this stage holds, or None."""
    named = stage.named_parameters()
    return next((p for name, p in named if name in stage.tied_parameters), None)


@distributed_test(world_size=3)
def test_three_owners_add_in_stage_order():
    plain = make(thrice=True)
    stage = split(plain)
    # layers 0 and 1 are on stage 0 (4 layers: 2, 1, 1), so the embedding and layer 1 share a stage
    owners = dict.fromkeys(("embed.weight", "layers.1.weight", "head.weight"), (0, 2))
    assert stage.tied_parameters == owners
    assert (local(stage) is None) == (stage.rank == 1)
    trains_on(stage, plain, make_batches(), exact=False)


@distributed_test(world_size=4)
def test_owners_get_equal_bits_in_low_precision():
    stage = split(make(thrice=True, dtype=torch.bfloat16))
    assert stage.tied_parameters["embed.weight"] == (0, 1, 3)
    step(stage, make_batches())
    gradient = local(stage).grad if stage.rank != 2 else torch.zeros(4, 4, dtype=torch.bfloat16)
    first, second, _, last = all_gather(gradient)
    assert torch.equal(first, second)
    assert torch.equal(first, last)


@distributed_test(world_size=2)
def test_gradients_add_up_until_they_are_dropped():
    plain = make()
    stage = split(plain)
    for set_to_none in (None, None, True, False, None):
        step(stage, make_batches())
        accumulate(plain, make_batches())
        require_same(stage, plain)
        if set_to_none is not None:
            stage.zero_grad(set_to_none=set_to_none)
            plain.zero_grad(set_to_none=set_to_none)


@distributed_test(world_size=2)
def test_every_owner_starts_from_the_first_ones_values():
    torch.manual_seed(torch.distributed.get_rank())
    stage = PipelineParallel(Net(4, tied=True), group=world())
    first, last = all_gather(local(stage).detach())
    assert torch.equal(first, last)


@distributed_test(world_size=2)
def test_an_owner_without_gradient_counts_as_zeros():
    model = make()
    model.embed.weight.requires_grad_(False)
    frozen, stage = split(model), split(make())
    step(frozen, make_batches())
    assert local(frozen).grad is None
    stage.sync_tied_gradients()
    assert local(stage).grad is None
    if stage.rank == 1:
        local(stage).grad = torch.ones(4, 4, dtype=torch.float64)
    stage.sync_tied_gradients()
    assert torch.equal(local(stage).grad, torch.ones(4, 4, dtype=torch.float64))


@distributed_test(world_size=2)
def test_sparse_and_strided_gradients():
    plain, model = make(), make()
    model.embed.sparse = True
    strided = nn.Parameter(model.embed.weight.detach().t().contiguous().t())
    model.embed.weight = model.head.weight = strided
    stage = PipelineParallel(model, group=world())
    step(stage, make_batches())
    accumulate(plain, make_batches())
    torch.testing.assert_close(local(stage).grad, plain.embed.weight.grad, rtol=1e-12, atol=1e-14)


class Shared(Net):
    """A parameter of the model itself: on every stage, used by some."""

    def __init__(self):
        super().__init__(4)
        self.scale = nn.Parameter(torch.ones(()))
        for layer in self.layers[1:]:
            layer.register_forward_hook(lambda module, args, output: output * self.scale)


@distributed_test(world_size=2)
def test_a_parameter_of_the_model_itself_is_on_every_stage():
    plain = build(Shared)
    stage = PipelineParallel(build(Shared), group=world())  # hooks of a copy take the first's scale
    assert stage.tied_parameters == {"scale": (0, 1)}
    trains_on(stage, plain, make_batches(), exact=False)


def zero_loss(output, batch):
    return output.sum() * 0


SUMMED, POSTPONED = (True, sum_loss), (False, sum_loss)


@distributed_test(world_size=2)
@pytest.mark.parametrize(
    ("before", "set_to_none", "after"),
    [
        ([], None, [SUMMED, POSTPONED, POSTPONED, SUMMED]),
        ([SUMMED, POSTPONED, POSTPONED], True, [SUMMED]),
        ([SUMMED, POSTPONED, POSTPONED], False, [SUMMED]),
        ([], None, [SUMMED, (False, zero_loss), SUMMED]),
    ],
)
def test_steps_that_are_summed_later_keep_what_was_summed_before(before, set_to_none, after):
    plain, batches = make(), make_batches(2)
    wrapper = Wrapper(split(plain))
    for steps, drops in ((before, set_to_none), (after, None)):
        for wrapper.require_backward_grad_sync, loss_fn in steps:
            train_step_pipeline(wrapper, batches, loss_fn=loss_fn)
            accumulate(plain, batches, loss_fn)
        for model in () if drops is None else (wrapper, plain):
            model.zero_grad(set_to_none=drops)
    require_same(wrapper, plain)


@distributed_test(world_size=4)
def test_losses_and_gradients_of_a_grid_add_up_to_those_of_the_global_batch():
    manager = setup_process_group_manager(pp_size=2, dp_size=2)
    batches, plain = make_batches(4), make()
    for row in range(4):
        batches[row]["labels"][0, :row] = -100  # more for some ranks than for others
    count = sum((batch["labels"] != -100).sum() for batch in batches)
    own = batches[manager.dp_rank * 2 :][:2]
    wrapper = Wrapper(PipelineParallel(make()), manager.cp_dp_group)
    assert wrapper.module.ranks == tuple(manager.pp_group_ids)
    for synced in (True, False, True):  # the second one's wait for the third
        wrapper.require_backward_grad_sync = synced
        loss = train_step_pipeline(wrapper, own)
        all_reduce(loss)
        expected = accumulate(plain, batches, lambda out, b: sum_loss(out, b) / count)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        if synced:
            require_same(wrapper, plain)
            wrapper.zero_grad()
            plain.zero_grad()


def test_a_failed_step_leaves_the_sync_as_it_was():
    wrapper = Wrapper(PipelineParallel(make()))

    def loss_fn(output, batch):
        if wrapper.synced:
            raise ZeroDivisionError
        return output.sum()

    with pytest.raises(ZeroDivisionError):
        train_step_pipeline(wrapper, make_batches(2), loss_fn=loss_fn)
    assert wrapper.require_backward_grad_sync


def test_no_valid_token_is_a_loss_of_zero():
    batches = make_batches(1)
    batches[0]["labels"].fill_(-100)
    stage = PipelineParallel(make())
    assert train_step_pipeline(stage, batches) == 0
    assert all((p.grad == 0).all() for p in stage.parameters())


def sequential():
    torch.manual_seed(0)
    layers = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 7)
    return nn.Sequential(*layers).double()


def batches_of(pipeline):
    """Return the micro-batches of one of two pipelines; their valid tokens differ in number."""
    generator = torch.Generator().manual_seed(pipeline)
    made = []
    for masked in (1, 2 + pipeline):
        ids = torch.randint(7, (2, 6), generator=generator)
        labels = ids.roll(1, 1)
        labels[:, :masked] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def sum_and_count(plain, pipeline):
    logits = [(plain(batch["input_ids"]), batch["labels"]) for batch in batches_of(pipeline)]
    losses = [F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum") for x, y in logits]
    return sum(losses), sum(int((y != -100).sum()) for _, y in logits)


@distributed_test(world_size=4)
def test_a_group_of_ones_own_counts_its_own_tokens():
    """Train two pipelines of two ranks below a manager of DP 2 x PP 2."""
    manager = setup_process_group_manager(dp_size=2, pp_size=2)
    pipeline = get_rank() // 2
    own, _ = new_subgroups_by_enumeration([[0, 1], [2, 3]])
    for whole, at_start, in_step in [
        (False, own, None),
        (False, None, own),  # of the step alone
        (True, None, None),  # the manager's
        (True, manager.pp_group, manager.pp_group),
    ]:
        stage = PipelineParallel(sequential(), Split(points=("2",)), group=at_start)
        loss = train_step_pipeline(stage, batches_of(pipeline), group=in_step)
        plain = sequential()
        total, count = sum_and_count(plain, pipeline)
        if whole:
            count += sum_and_count(plain, 1 - pipeline)[1]
        (total / count).backward()
        require_same(stage, plain)
        expected = total.detach() / count if stage.is_last_stage else loss * 0
        torch.testing.assert_close(loss, expected)

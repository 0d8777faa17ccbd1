"""Pipelines beneath data parallel wrappers, on a grid, and in one process."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scaletorch.dist.dist import all_reduce
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.pg_manager import ModuleWrapper, setup_process_group_manager
from scaletorch.parallel.pipeline_parallel import (
    PipelineParallel,
    train_step_pipeline_1f1b,
    train_step_pipeline_afab,
)

SHAPE = (2, 3, 4)


class Layer(nn.Linear):
    def forward(self, x):
        return x + super().forward(x).tanh()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.layers = nn.ModuleList(Layer(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Wrapper(ModuleWrapper):
    """Stands for a data parallel wrapper: sums gradients over a group in a synced backward."""

    def __init__(self, module, group=None):
        super().__init__(module)
        self.require_backward_grad_sync = True
        self.group = group
        self.calls = []

    def forward(self, *args, **kwargs):
        self.calls.append("forward")
        return self.module(*args, **kwargs)

    def backward(self, input_tensor, output_tensor, output_tensor_grad):
        self.calls.append(self.require_backward_grad_sync)
        result = self.module.backward(input_tensor, output_tensor, output_tensor_grad)
        if self.require_backward_grad_sync and self.group is not None:
            for parameter in self.parameters():
                all_reduce(parameter.grad, group=self.group)
        return result


def make():
    torch.manual_seed(0)
    return Net().double()


def make_batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, (count, 2, SHAPE[0], SHAPE[1]), generator=generator)
    tokens[0, 1, 0, :2] = -100
    tokens[:, 0].clamp_(min=0)
    return [{"input_ids": ids, "labels": labels} for ids, labels in tokens]


def serial_step(model, batches):
    count = sum((b["labels"] != -100).sum() for b in batches)
    total = 0
    for batch in batches:
        logits, labels = model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
        loss = F.cross_entropy(logits, labels, reduction="sum") / count
        loss.backward()
        total += loss.detach()
    return total


def check(stage, plain):
    references = dict(plain.named_parameters(remove_duplicate=False))
    for name, parameter in stage.named_parameters():
        torch.testing.assert_close(parameter.grad, references[name].grad, rtol=1e-12, atol=1e-14)


@distributed_test(world_size=2)
def test_only_the_last_backward_syncs():
    for step in (train_step_pipeline_afab, train_step_pipeline_1f1b):
        wrapper = Wrapper(Wrapper(PipelineParallel(make(), group=torch.distributed.group.WORLD)))
        step(wrapper, make_batches(3), SHAPE, "cpu", torch.float64)
        for calls in (wrapper.calls, wrapper.module.calls):
            assert calls.count("forward") == 3
            assert [c for c in calls if c != "forward"] == [False, False, True]
        assert wrapper.require_backward_grad_sync


@distributed_test(world_size=2)
def test_a_sync_that_is_switched_off_stays_off():
    stage = PipelineParallel(make(), group=torch.distributed.group.WORLD)
    wrapper = Wrapper(stage)
    wrapper.require_backward_grad_sync = False
    train_step_pipeline_1f1b(wrapper, make_batches(2), SHAPE, "cpu", torch.float64)
    assert [c for c in wrapper.calls if c != "forward"] == [False, False]
    assert not wrapper.require_backward_grad_sync
    wrapper.require_backward_grad_sync = True
    train_step_pipeline_1f1b(wrapper, make_batches(2), SHAPE, "cpu", torch.float64)
    plain = make()
    serial_step(plain, make_batches(2))
    serial_step(plain, make_batches(2))
    check(stage, plain)


@distributed_test(world_size=4)
def test_losses_of_a_grid_add_up_to_the_global_one():
    manager = setup_process_group_manager(pp_size=2, dp_size=2)
    batches = make_batches(4)
    own = batches[manager.dp_rank * 2 : manager.dp_rank * 2 + 2]
    plain = make()
    expected = serial_step(plain, batches)
    stage = PipelineParallel(copy.deepcopy(make()))
    assert stage.ranks == tuple(manager.pp_group_ids)
    wrapper = Wrapper(stage, manager.cp_dp_group)
    for _ in range(2):
        loss = train_step_pipeline_1f1b(wrapper, own, SHAPE, "cpu", torch.float64)
        all_reduce(loss)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        check(stage, plain)
        stage.zero_grad()


@distributed_test(world_size=4)
def test_tied_gradients_wait_for_the_wrappers_sync():
    manager = setup_process_group_manager(pp_size=2, dp_size=2)
    batches = make_batches(8)
    plain = make()
    serial_step(plain, batches[:4])
    serial_step(plain, batches[4:])
    wrapper = Wrapper(PipelineParallel(make()), manager.cp_dp_group)
    for begin, synced in ((0, False), (4, True)):
        wrapper.require_backward_grad_sync = synced
        own = batches[begin + manager.dp_rank * 2 :][:2]
        train_step_pipeline_1f1b(wrapper, own, SHAPE, "cpu", torch.float64)
    check(wrapper, plain)


@distributed_test(world_size=2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_dropped_gradients_stay_dropped(set_to_none):
    plain, batches = make(), make_batches(2)
    wrapper = Wrapper(PipelineParallel(make(), group=torch.distributed.group.WORLD))
    for synced in (True, False, False):
        wrapper.require_backward_grad_sync = synced
        train_step_pipeline_1f1b(wrapper, batches, SHAPE, "cpu", torch.float64)
    wrapper.zero_grad(set_to_none=set_to_none)
    wrapper.require_backward_grad_sync = True
    train_step_pipeline_1f1b(wrapper, batches, SHAPE, "cpu", torch.float64)
    serial_step(plain, batches)
    check(wrapper, plain)


@distributed_test(world_size=2)
def test_a_step_whose_gradients_are_zeros_drops_no_earlier_ones():
    plain, batches = make(), make_batches(4)
    wrapper = Wrapper(PipelineParallel(make(), group=torch.distributed.group.WORLD))
    for synced, own in ((True, batches[:2]), (False, batches), (True, batches[2:])):
        wrapper.require_backward_grad_sync = synced
        loss_fn = None if synced else lambda output, _: output.sum() * 0
        train_step_pipeline_1f1b(wrapper, own, SHAPE, "cpu", torch.float64, loss_fn=loss_fn)
        if synced:
            serial_step(plain, own)
    check(wrapper, plain)


def test_a_failed_step_leaves_the_sync_as_it_was():
    wrapper = Wrapper(PipelineParallel(make()))

    def loss_fn(output, batch):
        if False in wrapper.calls:
            raise ZeroDivisionError
        return output.sum()

    with pytest.raises(ZeroDivisionError):
        train_step_pipeline_1f1b(
            wrapper, make_batches(2), SHAPE, "cpu", torch.float64, loss_fn=loss_fn
        )
    assert wrapper.require_backward_grad_sync


def test_one_process_accumulates():
    plain, stage = make(), PipelineParallel(make())
    loss = train_step_pipeline_1f1b(stage, make_batches(3), SHAPE, "cpu", torch.float64)
    assert loss == serial_step(plain, make_batches(3))
    for parameter, reference in zip(stage.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, reference.grad)


def test_no_valid_token_is_a_loss_of_zero():
    batches = make_batches(1)
    batches[0]["labels"].fill_(-100)
    stage = PipelineParallel(make())
    assert train_step_pipeline_1f1b(stage, batches, SHAPE, "cpu", torch.float64) == 0
    assert all((p.grad == 0).all() for p in stage.parameters())

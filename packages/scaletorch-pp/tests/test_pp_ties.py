"""Parameters that several stages hold: found, equal at the start, summed once."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from scaletorch.dist.dist import all_gather
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.pg_manager import ModuleWrapper
from scaletorch.parallel.pipeline_parallel import PipelineParallel, train_step_pipeline_1f1b

SHAPE = (2, 3, 4)


class Layer(nn.Linear):
    def forward(self, x):
        return x + super().forward(x).tanh()


class Net(nn.Module):
    """An embedding whose weight is used again by a layer of the middle and by the head."""

    def __init__(self, thrice=False):
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.layers = nn.ModuleList(Layer(4, 4, bias=False) for _ in range(4))
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight
        if thrice:
            self.layers[1].weight = self.embed.weight

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make(thrice=False, dtype=torch.float64):
    torch.manual_seed(0)
    return Net(thrice).to(dtype)


def make_batches(count=3):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, (count, 2, SHAPE[0], SHAPE[1]), generator=generator)
    return [{"input_ids": ids, "labels": labels} for ids, labels in tokens]


def sum_loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def serial_gradient(model, batches):
    for batch in batches:
        sum_loss(model(batch["input_ids"]), batch).backward()
    return model.embed.weight.grad


def step(stage, batches):
    arguments = (SHAPE, "cpu", next(stage.parameters()).dtype)
    train_step_pipeline_1f1b(stage, batches, *arguments, loss_fn=sum_loss)


def local(stage):
    """The tied parameter that this stage holds, or None."""
    named = stage.named_parameters()
    return next((p for name, p in named if name in stage.tied_parameters), None)


@distributed_test(world_size=3)
def test_three_owners_add_in_stage_order():
    plain = make(thrice=True)
    stage = PipelineParallel(copy.deepcopy(plain), group=torch.distributed.group.WORLD)
    # layers 0 and 1 are on stage 0 (4 layers: 2, 1, 1), so the embedding and layer 1 share a stage
    owners = dict.fromkeys(("embed.weight", "layers.1.weight", "head.weight"), (0, 2))
    assert stage.tied_parameters == owners
    step(stage, make_batches())
    expected = serial_gradient(plain, make_batches())
    if stage.rank != 1:
        torch.testing.assert_close(local(stage).grad, expected, rtol=1e-12, atol=1e-14)
    else:
        assert local(stage) is None


@distributed_test(world_size=4)
def test_owners_get_equal_bits_in_low_precision():
    plain = make(thrice=True, dtype=torch.bfloat16)
    stage = PipelineParallel(plain, group=torch.distributed.group.WORLD)
    assert stage.tied_parameters["embed.weight"] == (0, 1, 3)
    step(stage, make_batches())
    gradient = local(stage).grad if stage.rank != 2 else torch.zeros(4, 4, dtype=torch.bfloat16)
    first, second, _, last = all_gather(gradient)
    assert torch.equal(first, second)
    assert torch.equal(first, last)


@distributed_test(world_size=2)
def test_steps_without_zero_grad_add_up():
    plain = make()
    stage = PipelineParallel(copy.deepcopy(plain), group=torch.distributed.group.WORLD)
    for _ in range(3):
        step(stage, make_batches())
    expected = serial_gradient(plain, make_batches() * 3)
    torch.testing.assert_close(local(stage).grad, expected, rtol=1e-12, atol=1e-14)


@distributed_test(world_size=2)
def test_zero_grad_between_steps():
    plain = make()
    stage = PipelineParallel(copy.deepcopy(plain), group=torch.distributed.group.WORLD)
    expected = serial_gradient(plain, make_batches())
    for set_to_none in (True, False):
        step(stage, make_batches())
        torch.testing.assert_close(local(stage).grad, expected, rtol=1e-12, atol=1e-14)
        stage.zero_grad(set_to_none=set_to_none)


@distributed_test(world_size=2)
def test_every_owner_starts_from_the_first_ones_values():
    torch.manual_seed(torch.distributed.get_rank())
    stage = PipelineParallel(Net(), group=torch.distributed.group.WORLD)
    first, last = all_gather(local(stage).detach())
    assert torch.equal(first, last)


@distributed_test(world_size=2)
def test_an_owner_without_gradient_counts_as_zeros():
    stage = PipelineParallel(make(), group=torch.distributed.group.WORLD)
    stage.sync_tied_gradients()
    assert local(stage).grad is None
    if stage.rank == 1:
        local(stage).grad = torch.ones(4, 4, dtype=torch.float64)
    stage.sync_tied_gradients()
    assert torch.equal(local(stage).grad, torch.ones(4, 4, dtype=torch.float64))


@distributed_test(world_size=2)
def test_a_frozen_tied_parameter():
    model = make()
    model.embed.weight.requires_grad_(False)
    stage = PipelineParallel(model, group=torch.distributed.group.WORLD)
    step(stage, make_batches())
    assert local(stage).grad is None


@distributed_test(world_size=2)
def test_sparse_and_strided_gradients():
    model = make()
    model.embed.sparse = True
    plain = copy.deepcopy(model)
    plain.embed.sparse = False
    strided = nn.Parameter(model.embed.weight.detach().t().contiguous().t())
    model.embed.weight = model.head.weight = strided
    stage = PipelineParallel(model, group=torch.distributed.group.WORLD)
    step(stage, make_batches())
    expected = serial_gradient(plain, make_batches())
    torch.testing.assert_close(local(stage).grad, expected, rtol=1e-12, atol=1e-14)


class Shared(Net):
    """A parameter of the model itself: on every stage, used by some."""

    def __init__(self):
        super().__init__()
        self.head.weight = nn.Parameter(torch.eye(4))
        self.scale = nn.Parameter(torch.ones(()))
        for index, layer in enumerate(self.layers):
            if index > 0:
                layer.register_forward_hook(self.scaled)

    def scaled(self, module, args, output):
        return output * self.scale


@distributed_test(world_size=2)
def test_a_parameter_of_the_model_itself_is_on_every_stage():
    torch.manual_seed(0)
    plain = Shared().double()
    torch.manual_seed(0)
    stage = PipelineParallel(Shared().double(), group=torch.distributed.group.WORLD)
    assert stage.tied_parameters == {"scale": (0, 1)}
    step(stage, make_batches())
    serial_gradient(plain, make_batches())
    torch.testing.assert_close(local(stage).grad, plain.scale.grad, rtol=1e-12, atol=0)


class Switch(ModuleWrapper):
    def __init__(self, module):
        super().__init__(module)
        self.require_backward_grad_sync = True


@distributed_test(world_size=2)
def test_steps_that_are_summed_later_keep_what_was_summed_before():
    plain = make()
    stage = PipelineParallel(copy.deepcopy(plain), group=torch.distributed.group.WORLD)
    switch = Switch(stage)
    for summed in (True, False, False, True):
        switch.require_backward_grad_sync = summed
        step(switch, make_batches())
        expected = serial_gradient(plain, make_batches())
    torch.testing.assert_close(local(stage).grad, expected, rtol=1e-12, atol=1e-14)

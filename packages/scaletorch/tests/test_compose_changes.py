"""What a program changes after ``parallelize``: gradients are followed, new parameters refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from training import SIZES, in_one_process, llama, tokens, train_and_compare

from scaletorch.compose import (
    clip_grad_norm_,
    full_state_dict,
    global_grad_norm,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.dist.errors import StateError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.parallel.pipeline_parallel import StageError


class Adapter(nn.Module):
    """A layer, and a trainable correction of low rank beside it."""

    def __init__(self, base, inputs, outputs):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(inputs, 2, bias=False).double()
        self.up = nn.Linear(2, outputs, bias=False).double()

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapt(model):
    for module in list(model.modules()):
        if hasattr(module, "q_proj"):
            outputs = module.q_proj.weight.shape[0]
            module.q_proj = Adapter(module.q_proj, SIZES["hidden_size"], outputs)


def check_adapters(layouts):
    for layout in layouts:
        manager = setup_process_group_manager(**layout)
        model = parallelize(llama().double(), manager, rehearse=False)
        adapt(model)
        with pytest.raises(
            (StateError, StageError), match=r"q_proj\.up\.weight.* came after the module"
        ):
            train_step(model, shard_global_batch(tokens(), 1, manager))
        destroy_process_group_manager()


AXES = [{f"{axis}_size": 2} for axis in ("dp", "cp", "pp", "tp")]


def test_adapters_that_come_after_parallelize_are_refused():
    run_ranks(check_adapters, 1, [{}])
    run_ranks(check_adapters, 2, AXES)


def adapted():
    model = llama().double()
    torch.manual_seed(1)
    adapt(model)
    return model


@pytest.mark.parametrize("layout", AXES[:3], ids=str)
def test_adapters_that_were_there_train(layout):
    batches = [tokens()]
    train_and_compare(in_one_process(adapted(), batches), adapted, layout, batches)


def check_clipping(layout, stage, change):
    manager = setup_process_group_manager(**layout)
    plain, model = llama().double(), parallelize(llama().double(), manager, rehearse=False)
    ours = torch.optim.SGD(model.parameters(), lr=1.0)
    theirs = torch.optim.SGD(plain.parameters(), lr=1.0)
    if stage:
        shard_optimizer(ours, model, stage=stage)
    train_step(model, shard_global_batch(tokens(), 1, manager))
    logits = plain(tokens()["input_ids"]).flatten(0, 1)
    nn.functional.cross_entropy(logits, tokens()["labels"].flatten()).backward()
    for each in (model, plain):
        for name, parameter in each.named_parameters():
            if name.endswith("layernorm.weight"):
                change(parameter)
    norm = clip_grad_norm_(model, 0.1)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(norm, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(global_grad_norm(model).item(), 0.1, rtol=1e-4, atol=0)
    ours.step()
    theirs.step()
    whole = full_state_dict(model)
    for name, each in plain.named_parameters():
        torch.testing.assert_close(whole[name], each.detach(), rtol=1e-9, atol=1e-12, msg=name)
    destroy_process_group_manager()


def drop(parameter):
    parameter.grad = None


def put(parameter):
    parameter.grad = torch.full_like(parameter, 5.0)


def freeze(parameter):
    parameter.requires_grad_(False)


@pytest.mark.parametrize("change", [drop, put, freeze])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_norms_and_clipping_follow(four, stage, change):
    four.run(check_clipping, {"dp_size": 2, "tp_size": 2}, stage, change)

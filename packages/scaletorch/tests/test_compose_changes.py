"""What a program changes after `parallelize` and before clipping is followed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from training import llama, tokens

from scaletorch.compose import (
    clip_grad_norm_,
    full_state_dict,
    global_grad_norm,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)


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

"""Arguments of a wrong kind get an error of ours."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.parallel.data_parallel import (
    DataParallelBucket,
    GradScaler,
    clip_grad_norm_,
    global_token_count,
    shard_optimizer,
    whole_gradients,
)


def shard_another():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    shard_optimizer(optimizer, DataParallelBucket(nn.Linear(2, 2)))


CALLS = {
    "scale": (lambda: GradScaler("cpu", -1), "init_scale must be a finite number above 0, got -1"),
    "no scale": (lambda: GradScaler("cpu", float("nan")), "init_scale must be a finite number"),
    "growth": (lambda: GradScaler("cpu", growth_factor=1), "growth_factor must be .* above 1"),
    "backoff": (lambda: GradScaler("cpu", backoff_factor=2), "backoff_factor must be between 0"),
    "interval": (lambda: GradScaler("cpu", growth_interval=0), "growth_interval must be a number"),
    "device": (lambda: GradScaler("cpuu"), "device must be a type such as 'cpu' or 'cuda', got"),
    "optimizer": (shard_another, "has none of the model's parameters that require grad"),
    "norm": (lambda: clip_grad_norm_(None, 1.0), "model must be a module, got NoneType"),
    "gradients": (lambda: whole_gradients(None), "model must be a module, got NoneType"),
    "labels": (lambda: global_token_count(None), "labels must be integer tensors, got NoneType"),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_one_process(name):
    call, text = CALLS[name]
    with pytest.raises(InvalidArgumentError, match=text):
        call()

"""Arguments of a wrong kind get an error of ours."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.parallel.data_parallel import (
    DataParallelBucket,
    DataParallelNaive,
    GradScaler,
    clip_grad_norm_,
    global_grad_norm,
    global_token_count,
    shard_optimizer,
    whole_gradients,
)


def shard_another():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    shard_optimizer(optimizer, DataParallelBucket(nn.Linear(2, 2)))


def wrap(**options):
    return DataParallelBucket(nn.Linear(1, 1), **options)


FACTORS = "init_scale must be above 0 and finite, growth_factor above 1 and finite, backoff_factor"
CALLS = [
    *(
        (partial(GradScaler, "cpu", **{name: value}), FACTORS)
        for name, value in (
            ("init_scale", -1), ("init_scale", math.nan), ("growth_factor", 1.0),
            ("backoff_factor", 0.0), ("backoff_factor", math.nan), ("growth_interval", 0),
        )
    ),
    (shard_another, "has none of the model's parameters that require grad"),
    (partial(clip_grad_norm_, None, 1.0), "model must be a module, got NoneType"),
    (partial(whole_gradients, None), "model must be a module, got NoneType"),
    *(
        (partial(wrap, bucket_size=size), "bucket_size must be a number of elements")
        for size in (0, 2.0, True)
    ),
    *(
        (partial(wrap, grad_type=kind), "grad_type must be a floating-point dtype")
        for kind in (torch.int64, "float32")
    ),
    (partial(wrap, reduce_dtype=torch.int32), "reduce_dtype must be a floating-point dtype"),
    (partial(DataParallelBucket, {}), "must be a torch.nn.Module, got dict"),
    (partial(DataParallelNaive, nn.Linear(1, 1), op="avg"), "one of 'sum', 'mean', got 'avg'"),
    *(
        (partial(global_grad_norm, nn.Linear(1, 1), norm_type=order), "norm_type must be a number")
        for order in (0, math.nan, "two")
    ),
    *(
        (partial(clip_grad_norm_, nn.Linear(1, 1), most), "max_norm must be a number of at least 0")
        for most in (-1, math.nan, "1")
    ),
    (partial(global_token_count, None), "labels must be integer tensors, got NoneType"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "text"), CALLS)
def test_one_process(call, text):
    with pytest.raises(InvalidArgumentError, match=text):
        call()

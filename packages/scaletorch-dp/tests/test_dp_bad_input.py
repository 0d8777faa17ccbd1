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


FACTORS = "growth_factor must be a finite number above 1, backoff_factor between 0 and 1, and"
CALLS = [
    (partial(GradScaler, "cpu", -1), "init_scale must be a finite number above 0, got -1"),
    (partial(GradScaler, "cpu", math.nan), "init_scale must be a finite number"),
    *(
        (partial(GradScaler, "cpu", **{name: value}), FACTORS)
        for name, values in {
            "growth_factor": (1.0, math.inf), "backoff_factor": (0.0, 1.0, math.nan),
            "growth_interval": (0,),
        }.items()
        for value in values
    ),
    (shard_another, "has none of the model's parameters that require grad"),
    (partial(clip_grad_norm_, None, 1.0), "model must be a module, got NoneType"),
    (partial(whole_gradients, None), "model must be a module, got NoneType"),
    *(
        (partial(wrap, bucket_size=size), "bucket_size must be a number of elements")
        for size in (0, -1, 2.0, True, None)
    ),
    *(
        (partial(wrap, grad_type=kind), "grad_type must be a floating-point dtype")
        for kind in (torch.int64, "float32", float)
    ),
    (partial(wrap, reduce_dtype=torch.int32), "reduce_dtype must be a floating-point dtype"),
    (partial(DataParallelBucket, {}), "must be a torch.nn.Module, got dict"),
    (partial(DataParallelNaive, {}), "must be a torch.nn.Module, got dict"),
    (partial(wrap, op="avg"), "one of 'sum', 'mean', got 'avg'"),
    (partial(DataParallelNaive, nn.Linear(1, 1), op="avg"), "one of 'sum', 'mean', got 'avg'"),
    *(
        (partial(global_grad_norm, nn.Linear(1, 1), norm_type=order), "norm_type must be a number")
        for order in (0, -1, math.nan, "two", None)
    ),
    *(
        (partial(clip_grad_norm_, nn.Linear(1, 1), most), "max_norm must be a number of at least 0")
        for most in (-1, math.nan, "1", None)
    ),
    (partial(global_token_count, None), "labels must be integer tensors, got NoneType"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "text"), CALLS)
def test_one_process(call, text):
    with pytest.raises(InvalidArgumentError, match=text):
        call()

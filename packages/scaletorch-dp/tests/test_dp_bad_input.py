"""Arguments of a wrong kind get an error of ours."""

from __future__ import annotations

import math

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


CALLS = {
    "scale": (lambda: GradScaler("cpu", -1), "init_scale must be a finite number above 0, got -1"),
    "no scale": (lambda: GradScaler("cpu", float("nan")), "init_scale must be a finite number"),
    **{
        f"scaler {name}={value}": (
            lambda name=name, value=value: GradScaler("cpu", **{name: value}),
            "growth_factor must be a finite number above 1, backoff_factor between 0 and 1, and",
        )
        for name, value in (
            ("growth_factor", 1.0),
            ("growth_factor", math.inf),
            ("backoff_factor", 0.0),
            ("backoff_factor", 1.0),
            ("backoff_factor", math.nan),
            ("growth_interval", 0),
        )
    },
    "optimizer": (shard_another, "has none of the model's parameters that require grad"),
    "norm": (lambda: clip_grad_norm_(None, 1.0), "model must be a module, got NoneType"),
    "gradients": (lambda: whole_gradients(None), "model must be a module, got NoneType"),
    **{
        f"size {size}": (
            lambda size=size: DataParallelBucket(nn.Linear(1, 1), bucket_size=size),
            "bucket_size must be a number of elements",
        )
        for size in (0, -1, 2.0, True, None)
    },
    **{
        f"grad_type {kind}": (
            lambda kind=kind: DataParallelBucket(nn.Linear(1, 1), kind),
            "grad_type must be a floating-point dtype",
        )
        for kind in (torch.int64, "float32", float)
    },
    **{
        f"{kind.__name__} of {what}": (lambda kind=kind, given=given: kind(**given), text)
        for kind in (DataParallelBucket, DataParallelNaive)
        for what, given, text in (
            ("op", {"module": nn.Linear(1, 1), "op": "avg"}, r"one of 'sum', 'mean', got 'avg'"),
            ("dict", {"module": {}}, r"must be a torch.nn.Module, got dict"),
        )
    },
    "reduce_dtype": (
        lambda: DataParallelBucket(nn.Linear(1, 1), reduce_dtype=torch.int32),
        "reduce_dtype must be a floating-point dtype",
    ),
    **{
        f"norm of order {order}": (
            lambda order=order: global_grad_norm(nn.Linear(1, 1), norm_type=order),
            "norm_type must be a number above 0",
        )
        for order in (0, -1, math.nan, "two", None)
    },
    **{
        f"norm of at most {most}": (
            lambda most=most: clip_grad_norm_(nn.Linear(1, 1), most),
            "max_norm must be a number of at least 0",
        )
        for most in (-1, math.nan, "1", None)
    },
    "labels": (lambda: global_token_count(None), "labels must be integer tensors, got NoneType"),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_one_process(name):
    call, text = CALLS[name]
    with pytest.raises(InvalidArgumentError, match=text):
        call()

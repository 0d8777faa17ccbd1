"""Buckets that ranks of one host reduce in one another's memory give what messages give."""

from __future__ import annotations

import copy
import gc
import os
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as c10d
from torch import nn

from scaletorch.dist.testing import preload, run_ranks
from scaletorch.dist.transport import flat_buffers
from scaletorch.parallel.data_parallel import DataParallelBucket, shard_optimizer

STEPS, MICRO_BATCHES = 3, 2


@pytest.fixture(scope="module", autouse=True)
def _dynamo():
    preload("torch._dynamo")  # which the first zero_grad of a process imports


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 6))

    def forward(self, tokens):
        return (self.layers(self.embedding(tokens)) @ self.embedding.weight.t()).square().mean()


def batches():
    """Tokens of every step, rank and micro-batch."""
    generator = torch.Generator().manual_seed(1)
    shape = (STEPS, c10d.get_world_size(), MICRO_BATCHES, 2, 5)
    return torch.randint(11, shape, generator=generator)


def train_alone(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in batches():
        optimizer.zero_grad()
        for micro_batch in step.flatten(0, 1):
            model(micro_batch).backward()
        optimizer.step()


def train(model, options, stage, *, synchronised):
    """Train as a rank; sums of all micro-batches' losses."""
    wrapped = DataParallelBucket(model, bucket_size=40, group=c10d.group.WORLD, **options)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    if stage:
        shard_optimizer(optimizer, wrapped, stage=stage, overlap=stage == 1)
    scale = c10d.get_world_size() if options.get("op") == "mean" else 1
    for step in batches():
        optimizer.zero_grad()
        for at, micro_batch in enumerate(step[c10d.get_rank()]):
            last = at + 1 == MICRO_BATCHES
            with nullcontext() if last or synchronised else wrapped.no_sync():
                (wrapped(micro_batch) * scale).backward()
        optimizer.step()
    wrapped.wait_for_parameters()
    return wrapped


def fresh_model(dtype):
    torch.manual_seed(0)
    return Model().to(dtype)


def check_training(options, stage):
    flat_buffers.LEAST = 1
    plain = fresh_model(torch.float64)
    train_alone(plain)
    wrapped = train(fresh_model(torch.float64), options, stage, synchronised=False)
    assert wrapped.bucket_managers[0].reduction.buffers.shared
    for (name, one), other in zip(
        plain.named_parameters(), wrapped.module.parameters(), strict=True
    ):
        torch.testing.assert_close(other, one, rtol=1e-11, atol=1e-13, msg=name)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"op": "mean"}, {"order": "rank"}], ids=str)
def test_training_is_that_of_one_process(options, stage):
    run_ranks(check_training, 3, options, stage)


def check_bits(options, stage, dtype):
    flat_buffers.LEAST = 1
    with mock.patch.dict(os.environ, {"SCALETORCH_SHARED_MEMORY": "0"}):
        messages = train(fresh_model(dtype), options, stage, synchronised=True)
    assert not messages.bucket_managers[0].reduction.buffers.shared
    memory = train(fresh_model(dtype), options, stage, synchronised=True)
    for one, other in zip(messages.parameters(), memory.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_in_rank_order_have_the_same_bits(dtype, stage):
    run_ranks(check_bits, 4, {"order": "rank", "grad_type": torch.float32}, stage, dtype)


def check_kept_gradients():
    flat_buffers.LEAST = 1
    wrapped = DataParallelBucket(fresh_model(torch.float32), group=c10d.group.WORLD)
    kept = []
    for step in batches():
        wrapped.zero_grad()
        wrapped(step[c10d.get_rank(), 0]).backward()
        gradients = [each.grad for each in wrapped.parameters()]
        if c10d.get_rank() == 1:  # one rank keeps what the others write into
            kept.append((gradients, copy.deepcopy(gradients)))
    for gradients, copies in kept:
        for one, other in zip(gradients, copies, strict=True):
            assert torch.equal(one, other)


def test_nobody_writes_into_a_gradient_that_is_kept():
    run_ranks(check_kept_gradients, 2)


def shared_files():
    links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sum("memfd:scaletorch" in link for link in links)


def check_memory():
    flat_buffers.LEAST = 1
    before = shared_files()  # of pools of ranks that other tests keep
    wrapped = train(fresh_model(torch.float32), {}, 1, synchronised=False)
    buckets = len(wrapped.bucket_managers[0].buckets)
    assert shared_files() - before == 2 * buckets  # gradients and parameters
    wrapped.zero_grad()
    del wrapped
    gc.collect()
    assert shared_files() == before
    assert before or "memfd:scaletorch" not in Path("/proc/self/maps").read_text()


def test_memory_is_given_back_with_the_wrapper():
    run_ranks(check_memory, 2)

"""Division of parameters into buckets, and the order of the buckets' reductions."""

from __future__ import annotations

import contextlib
import itertools
from unittest import mock

import torch
import torch.distributed as c10d
from hypothesis import given, settings
from hypothesis import strategies as st
from in_turn import in_turn
from torch import nn

from scaletorch.dist import all_gather_object
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.data_parallel import BucketManager, DataParallelBucket, DataParallelNaive
from scaletorch.parallel.data_parallel.buckets import bucket, manager

ALONE = bucket.Reduction("sum", None)
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64]


def make_slots(parts):
    return [
        bucket.Slot(f"p{at}", at, nn.Parameter(torch.zeros(elements, dtype=dtype)))
        for at, (elements, dtype) in enumerate(parts)
    ]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(DTYPES)), max_size=25),
    st.integers(1, 30),
    st.sampled_from([None, torch.float32]),
)
def test_buckets_hold_every_slot_once(parts, bucket_size, grad_type):
    slots = make_slots(parts)
    buckets = BucketManager([], ALONE, bucket_size, grad_type).fill(slots)
    places = [[slot.index for slot in each.slots] for each in buckets]
    assert sorted(at for each in places for at in each) == list(range(len(slots)))
    assert all(each == sorted(each) for each in places)  # the order given, within a bucket
    assert [each[-1] for each in places] == sorted(each[-1] for each in places)  # and between
    for each in buckets:
        assert len(each.slots) == 1 or each.elements <= bucket_size
        for slot in each.slots:
            real = slot.parameter.dtype.is_floating_point
            assert each.dtype == (grad_type if grad_type and real else slot.parameter.dtype)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=25), st.integers(1, 30))
def test_buckets_are_full(sizes, bucket_size):
    slots = make_slots([(n, torch.float32) for n in sizes])
    buckets = BucketManager([], ALONE, bucket_size).fill(slots)
    for each, after in itertools.pairwise(buckets):
        assert each.elements + after.slots[0].parameter.numel() > bucket_size


def test_bucket_info_is_plain_data():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(torch.bfloat16)
    model[0].bias.requires_grad_(False)
    wrapped = DataParallelBucket(model, torch.float32, bucket_size=5)
    assert wrapped.get_bucket_info() == [
        {"parameters": ["1.bias", "1.weight"], "elements": 4, "dtype": "torch.float32"},
        {"parameters": ["0.weight"], "elements": 6, "dtype": "torch.float32"},
    ]
    assert DataParallelNaive(model).get_bucket_info() == [
        {"parameters": [name], "elements": elements, "dtype": "torch.bfloat16"}
        for name, elements in (("1.bias", 1), ("1.weight", 3), ("0.weight", 6))
    ]


class Fork(nn.Module):
    """Four layers, of which a call may leave out some."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(4)])

    def forward(self, x, use):
        for at in use:
            x = self.layers[at](x)
        return x


@contextlib.contextmanager
def record(log):
    """Let every all_reduce note its operation and size."""

    def noting(original):
        def noted(data, op, **kwargs):
            log.append((op, data.numel()))
            return original(data, op, **kwargs)

        return noted

    with (
        mock.patch.object(manager, "all_reduce", noting(manager.all_reduce)),
        mock.patch.object(bucket, "all_reduce_flat", noting(bucket.all_reduce_flat)),
    ):
        yield


def check_launch_order():
    """The ranks use other layers, and issue the same calls in the same order."""
    torch.manual_seed(0)
    model = DataParallelBucket(Fork(), bucket_size=4, group=c10d.group.WORLD)
    log = []
    model.module.layers[0].weight.register_hook(lambda grad: log.append("first layer"))
    with record(log):
        for use in ([0, 1, 2, 3], [0, 3] if c10d.get_rank() else [0, 2]):
            log.clear()
            model.zero_grad()
            model(torch.ones(1, 2), use).sum().backward()
            calls = [each for each in log if each != "first layer"]
            assert calls == [("sum", 4)] * 4 + [("max", 10)]
            if len(use) == 4:  # three buckets left before backward came to the first layer
                assert log.index("first layer") == 3
    assert all_gather_object(calls) == [calls, calls]
    assert model.module.layers[1].weight.grad is None


def check_naive_order():
    model = DataParallelNaive(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), c10d.group.WORLD)
    log = []
    model.module[0].weight.register_post_accumulate_grad_hook(lambda _: log.append("last gradient"))
    with record(log):
        model(torch.ones(1, 2)).sum().backward()
    sizes = [each[1] for each in log if each != "last gradient"]
    assert log.index("last gradient") == 0
    assert sizes == [1, 3, 3, 6, 10]


def test_buckets_leave_during_backward_in_one_order_and_naive_ones_at_its_end():
    run_ranks(in_turn, 2, [check_launch_order, check_naive_order])

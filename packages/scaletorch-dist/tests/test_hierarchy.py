"""Collectives that go inside the nodes first give what flat ones give."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as c10d

import scaletorch.dist as dist
from scaletorch.dist.collectives import hierarchy
from scaletorch.dist.testing import run_ranks

CASES = [
    (torch.float64, ("sum", "mean", "max", "product")),
    (torch.float32, ("sum", "mean", "min")),
    (torch.bfloat16, ("sum", "mean", "max")),
    (torch.float16, ("mean",)),
    (torch.int16, ("sum", "mean", "band")),
    (torch.int64, ("bxor", "min")),
    (torch.bool, ("sum", "mean")),
    (torch.complex64, ("sum",)),
]


def values(rank, shape, dtype):
    generator = torch.Generator().manual_seed(rank)
    # Whole numbers, so that sums are exact in any order.
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def results(group, shape, dtype, op):
    """What every call gives on this rank."""
    rank, size = dist.get_rank(), group.size()
    reduced = values(rank, shape, dtype)
    dist.all_reduce(reduced, op, group=group)
    strided = values(rank, shape, dtype).t().contiguous().t()
    dist.all_reduce(strided, op, group=group)
    gathered = dist.all_gather(values(rank, shape, dtype), group=group)
    filled = [torch.empty(shape, dtype=dtype) for _ in range(size)]
    dist.all_gather(filled, values(rank, shape, dtype), group=group)
    entries = [values(rank * size + at, (at, *shape), dtype) for at in range(size)]  # uneven
    scattered = torch.empty((group.rank(), *shape), dtype=dtype)
    dist.reduce_scatter(scattered, entries, op, group=group)
    return [reduced, strided, scattered, *gathered, *filled]


def check_results(nodes, members):
    os.environ["GROUP_RANK"] = str(nodes[dist.get_rank()])  # a node of its own to everyone
    hierarchy.LEAST = 0
    flat, deep = c10d.new_group(members), c10d.new_group(members)
    if dist.get_rank() in members:
        assert dist.use_hierarchy(deep)
        made = hierarchy._known[deep]
        assert dist.use_hierarchy(deep)
        assert hierarchy._known[deep] is made  # a second time changes nothing
        for dtype, ops in CASES:
            for op in ops:
                for shape in ((1, 1), (3, 5), (0, 2)):
                    for one, other in zip(
                        results(flat, shape, dtype, op), results(deep, shape, dtype, op),
                        strict=True,
                    ):  # fmt: skip
                        assert one.dtype == other.dtype
                        assert torch.equal(one, other), (dtype, op, shape)
        work = dist.all_reduce(torch.ones(3), group=deep, async_op=True)  # goes the flat way
        work.wait()
    dist.barrier()


@pytest.mark.parametrize(
    ("nodes", "members"),
    [
        ([0, 0, 1, 1], [0, 1, 2, 3]),
        ([0, 1, 0, 1], [0, 1, 2, 3]),  # ranks dealt out in turn
        ([0, 1, 2, 2, 1, 0], [0, 1, 2, 3, 4, 5]),
        ([0, 0, 1, 1, 2], [0, 1, 2, 3]),  # a group of some ranks
    ],
    ids=str,
)
def test_results_are_those_of_flat_calls(nodes, members):
    run_ranks(check_results, len(nodes), nodes, members)


def check_refused(nodes):
    os.environ["GROUP_RANK"] = str(nodes[dist.get_rank()])
    assert not dist.use_hierarchy()
    data = torch.ones(4)
    dist.all_reduce(data)
    assert data.tolist() == [4] * 4


@pytest.mark.parametrize("nodes", [[0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 0, 1]], ids=str)
def test_where_nothing_is_to_gain_all_stays_flat(nodes):
    run_ranks(check_refused, 4, nodes)


def test_one_process_has_no_nodes():
    assert not dist.use_hierarchy()

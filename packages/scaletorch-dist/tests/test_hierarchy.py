"""Collectives that go inside the nodes first give what flat ones give."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as c10d

import scaletorch.dist as dist
from scaletorch.dist.building import all_gather_flat, even_counts, reduce_scatter_flat
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.dist.world.info import info_of

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
    flat, deep = c10d.new_group(members), c10d.new_group(members)
    if dist.get_rank() in members:
        assert dist.use_hierarchy(deep)
        made = info_of(deep).ways["cpu"]
        assert dist.use_hierarchy(deep)
        assert info_of(deep).ways["cpu"] is made  # a second time changes nothing
        for dtype, ops in CASES:
            for op in ops:
                for shape in ((3, 5), (0, 2)):
                    expected = results(flat, shape, dtype, op)
                    found = results(deep, shape, dtype, op)
                    for one, other in zip(expected, found, strict=True):
                        assert one.dtype == other.dtype
                        assert torch.equal(one, other), (dtype, op, shape)
    dist.barrier()


@pytest.mark.parametrize(
    ("nodes", "members"),
    [
        ([0, 1, 0, 1], [0, 1, 2, 3]),  # ranks dealt out in turn
        ([0, 1, 2, 2, 1, 0], [0, 1, 2, 3, 4, 5]),
        ([0, 0, 1, 1, 2], [0, 1, 2, 3]),  # a group of some ranks
    ],
    ids=str,
)
def test_results_are_those_of_flat_calls(nodes, members):
    run_ranks(check_results, len(nodes), nodes, members)


def started(group, at, dtype):
    """Start a call of each kind; return them with what takes the results out of them."""
    rank, size = group.rank(), group.size()
    data = values(100 * at + rank, (5 + at,), dtype)
    own = data.clone()
    entries = [values(at + place + size * rank, (place + at,), dtype) for place in range(size)]
    shard = torch.empty((rank + at,), dtype=dtype)
    counts = [at, *range(size - 1)]
    flat = values(7 * at, (sum(counts),), dtype)
    flat[: sum(counts[:rank])] = flat[sum(counts[: rank + 1]) :] = 0
    return [
        (dist.all_reduce(own, group=group, async_op=True), lambda _: own),
        (dist.reduce_scatter(shard, entries, group=group, async_op=True), lambda _: shard),
        (dist.all_gather(data, group, async_op=True), torch.stack),
        (reduce_scatter_flat(data, even_counts(len(data), size), group=group), lambda part: part),
        (all_gather_flat(flat, counts, group, async_op=True), lambda _: flat),
    ]


@distributed_test(world_size=4)
def test_calls_under_way_go_through_the_nodes_too():
    nodes, rank = [0, 1, 0, 1], dist.get_rank()
    os.environ["GROUP_RANK"] = str(nodes[rank])
    flat, deep = (c10d.new_group(range(len(nodes))) for _ in range(2))
    assert dist.use_hierarchy(deep)
    for dtype in (torch.float64, torch.bfloat16, torch.int32):
        found = []
        for group in (flat, deep):
            works = [pair for at in range(1, 4) for pair in started(group, at, dtype)]
            order = range(len(works))
            if group is deep and rank % 2:
                order = reversed(order)  # whoever waits for the last call makes all before it
            results = {at: works[at][1](works[at][0].wait()) for at in order}
            found.append([results[at] for at in range(len(works))])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other), (dtype, one, other)
    assert not info_of(deep).ways["cpu"]._tasks
    work = dist.all_reduce(torch.ones(3), group=deep, async_op=True)
    last = torch.ones(3)
    dist.all_reduce(last, group=deep)  # a call that waits makes those before it first
    assert last.tolist() == [len(nodes)] * 3
    assert work.is_completed()
    work.wait()


def check_refused(nodes):
    os.environ["GROUP_RANK"] = str(nodes[dist.get_rank()])
    assert not dist.use_hierarchy()
    data = torch.ones(4)
    dist.all_reduce(data)
    assert data.tolist() == [4] * 4


@pytest.mark.parametrize("nodes", [[0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 0, 1]], ids=str)
def test_where_nothing_is_to_gain_all_stays_flat(nodes):
    run_ranks(check_refused, 4, nodes)
    assert not dist.use_hierarchy()

"""Ranks of one host work in one another's memory: what they compute, and what they leave."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as c10d

import scaletorch.dist as dist
from scaletorch.dist.building import (
    FlatBuffers,
    all_gather_flat,
    all_reduce_flat,
    even_parts,
    reduce_scatter_flat,
)
from scaletorch.dist.errors import MismatchError, RankFailedError, StateError
from scaletorch.dist.testing import run_ranks
from scaletorch.dist.transport import blocks, flat_buffers, joining, levels
from scaletorch.dist.transport import node_memory as memories
from scaletorch.dist.transport.joining import node_memory
from scaletorch.dist.transport.node_memory import NodeMemory
from scaletorch.dist.transport.ways import way_of

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex64]


def everyones(elements, dtype):
    """Every rank's values."""
    return [
        torch.randn(elements, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(dist.get_world_size())
    ]


def in_rank_order(values, start=None, divisor=1):
    wide = torch.float32 if values[0].dtype == torch.bfloat16 else values[0].dtype
    if start is not None:
        total = start.to(wide)
        for each in values:
            total = total + (each if divisor == 1 else each.to(wide) / divisor)
        return total
    total = values[0].to(wide)
    for each in values[1:]:
        total = total + each
    return total / divisor


def check_results(dtype, elements, chunk):
    memories.CHUNK = chunk
    memory = node_memory(c10d.group.WORLD)
    rank, size = dist.get_rank(), dist.get_world_size()
    values = everyones(elements, dtype)
    counts = [elements // size] * (size - 1)
    counts.append(elements - sum(counts))
    counts.reverse()  # uneven, and some may be zero
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    start = torch.full((elements,), 3.0, dtype=torch.float32 if dtype.itemsize < 4 else dtype)
    for mean in (False, True):
        for begun in (None, start):
            part = None if begun is None else begun[own]
            want = in_rank_order(values, begun, size if mean else 1)
            shared = memory.empty(elements, dtype, memory.slot()).copy_(values[rank])
            foreign = values[rank].clone()
            for data in (shared, foreign):
                untouched = data.clone()
                mine = memory.reduce_scatter(data, counts, mean=mean, start=part).wait()
                assert torch.equal(mine, want[own])
                assert torch.equal(data, untouched)
                assert memory.all_reduce(data, counts, mean=mean, start=part).wait() is data
                assert torch.equal(data, want.to(dtype))
    gathered = memory.empty(elements, dtype).zero_()
    gathered[own] = want[own].to(dtype)
    assert torch.equal(memory.all_gather(gathered, counts).wait(), want.to(dtype))
    nothing = torch.empty(0, dtype=dtype)
    assert memory.all_reduce(nothing, [0] * size, start=None).wait() is nothing


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_and_parts_are_those_of_rank_order(ranks, dtype):
    for elements, chunk in ((1, 4), (30, 4), (30, 1000)):
        run_ranks(check_results, ranks, dtype, elements, chunk)


def check_many_under_way(seed):
    memory = node_memory(c10d.group.WORLD)
    rank, size = dist.get_rank(), dist.get_world_size()
    same, own = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(rank)
    works = []
    for at in range(30):
        elements = int(torch.randint(1, 50, (), generator=same))
        shared = torch.rand((), generator=own) < 0.7  # each rank as it likes
        data = torch.full((elements,), float(at + rank))
        if shared:
            data = memory.empty(elements, torch.float32, at % 3).copy_(data)
        counts = [elements, *[0] * (size - 1)]
        works.append((at, memory.all_reduce(data, counts, start=None)))
        if torch.rand((), generator=own) < 0.3:
            time.sleep(0.005)
        if torch.rand((), generator=own) < 0.3:
            works[0][1].is_completed()
        if torch.rand((), generator=same) < 0.3:
            dist.all_reduce(torch.ones(1))  # beside collectives of the same group
    for pick in torch.randperm(30, generator=own).tolist():
        at, work = works[pick]
        assert (work.wait() == at * size + size * (size - 1) / 2).all()
    assert all(work.is_completed() for _, work in works)


@pytest.mark.parametrize("seed", range(3))
def test_many_under_way_in_any_order(seed):
    run_ranks(check_many_under_way, 3, seed)


def flat_results(values, op, start, made, told):
    """What flat calls give of tensors made of buffers, when they are told of buffers."""
    rank, elements = dist.get_rank(), len(values)
    counts = even_parts(elements, dist.get_world_size())
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    data = made.empty(elements, values.dtype, values.device, made.slot()).copy_(values)
    part = None if start is None else start[own]
    options = {"ordered": True, "buffers": told}
    shard = reduce_scatter_flat(data, counts, op, start=part, **options).wait()
    whole = all_reduce_flat(data, op, start=start, **options)
    assert whole.wait() is data
    for later in (False, True):
        gathered = made.empty(elements, values.dtype, values.device).zero_()
        gathered[own] = shard.to(values.dtype)
        work = all_gather_flat(gathered, counts, async_op=later, buffers=told)
        assert (work is None) != later
        if work is not None:
            work.wait()
        assert torch.equal(gathered, data)
    return shard, data


def check_flat_calls(dtype):
    flat_buffers.LEAST = 8
    buffers = FlatBuffers(c10d.group.WORLD)
    assert buffers.shared
    assert not FlatBuffers().shared
    begun = mock.Mock()
    begin = NodeMemory._begin
    counted = mock.patch.object(NodeMemory, "_begin", lambda *args: [begun(), begin(*args)][1])
    for elements in (3, 30):
        values = everyones(elements, dtype)[dist.get_rank()]
        start = torch.full((elements,), 3.0, dtype=torch.float32 if dtype.itemsize < 4 else dtype)
        for op in ("sum", "mean"):
            for first in (None, start):
                by_messages = flat_results(values, op, first, FlatBuffers(), None)
                begun.reset_mock()
                with counted:
                    by_memory = flat_results(values, op, first, buffers, buffers)
                assert begun.call_count == (4 if elements >= 8 else 0)
                for one, other in zip(by_messages, by_memory, strict=True):
                    assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flat_calls_take_the_way_of_their_buffers(dtype):
    run_ranks(check_flat_calls, 3, dtype)


def check_order_of_ways():
    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)
    assert dist.use_hierarchy()
    buffers, group = FlatBuffers(c10d.group.WORLD), c10d.group.WORLD
    small, large = torch.ones(4), torch.ones(flat_buffers.LEAST)
    assert isinstance(way_of(large, group, True, buffers), NodeMemory)
    for data, told in ((small, buffers), (large, FlatBuffers()), (large, None)):
        assert isinstance(way_of(data, group, True, told), levels.LevelsWay)


def test_memory_comes_before_levels_and_levels_before_the_backend():
    run_ranks(check_order_of_ways, 4)


def check_comparison():
    flat_buffers.LEAST = 1
    buffers = FlatBuffers(c10d.group.WORLD)
    dist.check_collectives()
    with pytest.raises(MismatchError, match="all_reduce_flat"):
        all_reduce_flat(torch.ones(4), "mean" if dist.get_rank() else "sum", buffers=buffers)
    assert all_reduce_flat(torch.ones(4), buffers=buffers).wait().tolist() == [2] * 4


def test_calls_by_memory_are_compared_too():
    run_ranks(check_comparison, 2)


def files():
    links = []
    for file in Path("/proc/self/fd").iterdir():
        try:
            links.append(file.readlink().name)
        except OSError:
            continue
    return sum("memfd:scaletorch" in link for link in links)


def mappings():
    return Path("/proc/self/maps").read_text().count("memfd:scaletorch")


def check_memory_is_given_back():
    assert files() == mappings() == 0
    memory = node_memory(c10d.group.WORLD)
    assert files() == mappings() == 0  # nothing is left of the try
    slot = memory.slot()
    for _ in range(5):  # each takes the place of the one before, here and with others
        data = memory.empty(1000, torch.float32, slot).zero_()
        memory.all_reduce(data, [1000, 0], start=None).wait()
        dist.barrier()
        assert (files(), mappings()) == (1, 2)
        other = memory.empty(1000, torch.float32).zero_()
        memory.all_reduce(other, [1000, 0], start=None).wait()
        del other
    del data
    gc.collect()
    assert (files(), mappings()) == (0, 1)
    memory.forget()
    assert mappings() == 0


def test_memory_is_given_back():
    run_ranks(check_memory_is_given_back, 2)


def check_no_memory():
    memory = node_memory(c10d.group.WORLD)
    data = torch.ones(4)
    failing = OSError("no memory") if dist.get_rank() == 1 else None
    create = mock.Mock(wraps=os.memfd_create, side_effect=failing)
    with mock.patch.object(blocks.os, "memfd_create", create):
        assert len(memory.empty(3, torch.float32)) == 3  # fails where it is to be shared
        work = memory.all_reduce(data, [2, 2], start=None)
    with pytest.raises(StateError, match="rank 1 cannot get memory to share"):
        work.wait()
    dist.barrier()
    assert memory.all_reduce(data, [2, 2], start=None).wait().tolist() == [2] * 4


def test_a_rank_without_memory_is_named_on_every_rank():
    run_ranks(check_no_memory, 2)


def check_unable():
    with mock.patch.object(joining, "this_host", return_value=dist.get_rank()):
        assert node_memory(c10d.group.WORLD) is None
    off = {"SCALETORCH_SHARED_MEMORY": "0"} if dist.get_rank() == 1 else {}
    with mock.patch.dict(os.environ, off):
        assert node_memory(c10d.group.WORLD) is None
    with mock.patch.object(joining, "attach", side_effect=PermissionError):
        assert node_memory(c10d.group.WORLD) is None
    assert node_memory(None) is None
    assert node_memory(c10d.group.WORLD) is not None


def test_ranks_that_cannot_share_memory_all_know():
    run_ranks(check_unable, 2)


def check_death():
    memory = node_memory(c10d.group.WORLD)
    if dist.get_rank() == 1:
        os._exit(3)
    with pytest.raises(RuntimeError, match=r"closed by peer|reset by peer"):
        memory.all_reduce(torch.ones(4), [2, 2], start=None).wait()


def test_a_rank_that_dies_ends_the_wait():
    with pytest.raises(RankFailedError) as failed:
        run_ranks(check_death, 2)
    assert list(failed.value.failures) == [1]

"""Large collectives of ranks that read one another's memory."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as c10d

import scaletorch.dist as dist
from scaletorch.dist import functional
from scaletorch.dist.errors import MismatchError, RankFailedError
from scaletorch.dist.testing import run_ranks
from scaletorch.dist.transport import by_memory as calls
from scaletorch.dist.transport import neighbours, reading
from scaletorch.dist.transport.by_memory import MemoryWay
from scaletorch.dist.transport.ways import way_of
from scaletorch.dist.world.info import info_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets processes do so")

OPS = {"sum": torch.sum, "mean": torch.mean, "product": torch.prod, "max": torch.amax}
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def near(least=1):
    """Let tensors of so many bytes go that way."""
    return mock.patch.object(neighbours, "LEAST", least)


def everyones(elements, dtype):
    """Every rank's values."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((dist.get_world_size(), elements), generator=generator) * 3
    return values.to(dtype)


def reduced(values, op):
    """Reduce in float64, or as the integers that they are."""
    if values.dtype == torch.bool:
        return values.all(0) if op in ("mean", "product") else values.any(0)
    if not values.is_floating_point():
        total = OPS["sum" if op == "mean" else op](values.long(), 0)
        total = total.div(len(values), rounding_mode="trunc") if op == "mean" else total
        return total.to(values.dtype)
    return OPS[op](values.double(), 0).to(values.dtype)


def check_reductions(dtype):
    size, rank = dist.get_world_size(), dist.get_rank()
    values = everyones(4 * size * 7, dtype)
    last = size - 1
    with near(), mock.patch.object(calls, "PIECE", 5):
        for op in OPS:
            want = reduced(values, op)
            close = {"rtol": 1e-6, "atol": 1e-6} if dtype in FLOATS[:2] else {}
            everywhere, at_last = values[rank].clone(), values[rank].clone()
            dist.all_reduce(everywhere, op)
            torch.testing.assert_close(everywhere, want, **close)
            dist.reduce(at_last, last, op)
            torch.testing.assert_close(at_last, want if rank == last else values[rank], **close)
            parts = list(
                values[rank].split([7 * (4 + (r == 0) - (r == last)) for r in range(size)])
            )
            own = torch.empty_like(parts[rank])
            dist.reduce_scatter(own, parts, op)
            torch.testing.assert_close(own, want.split([len(p) for p in parts])[rank], **close)
    assert info_of(c10d.group.WORLD).memory is not None


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int16, torch.bool])
@pytest.mark.parametrize("ranks", [2, 3])
def test_reductions(ranks, dtype):
    run_ranks(check_reductions, ranks, dtype)


def check_moves(dtype):
    size, rank = dist.get_world_size(), dist.get_rank()
    values = everyones(6 * size, dtype)
    own, last = values[rank].clone(), size - 1
    with near():
        assert torch.equal(torch.stack(dist.all_gather(own)), values)
        gathered = dist.gather(own, last)
        assert torch.equal(torch.stack(gathered), values) if rank == last else gathered == []
        sent = own.clone()
        dist.broadcast(sent, last)
        assert torch.equal(sent, values[last])
        part = torch.empty_like(own[:6])
        dist.scatter(part, list(own.split(6)) if rank == last else None, last)
        assert torch.equal(part, values[last].split(6)[rank])
        mine = slice(6 * rank, 6 * rank + 6)
        assert torch.equal(dist.all_to_all(own), values[:, mine].flatten())
        assert torch.equal(functional.all_gather(own, dim=0), values.flatten())
        assert torch.equal(own, values[rank])
        objects = dist.all_gather_object({"rank": rank, "data": own})
        assert [each["rank"] for each in objects] == list(range(size))
        assert all(torch.equal(each["data"], v) for each, v in zip(objects, values, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_moves(dtype):
    run_ranks(check_moves, 3, dtype)


def check_subgroup():
    ranks = [0, 2]
    group = c10d.new_group(ranks)
    if dist.get_rank() in ranks:
        data = torch.full((9,), float(dist.get_rank()))
        with near():
            dist.all_reduce(data, group=group)
            dist.broadcast(data[:3], 2, group)
        assert data.tolist() == [2.0] * 9
        assert info_of(group).memory is not None


def test_a_group_of_some_ranks():
    run_ranks(check_subgroup, 3)


def check_lengths():
    rank = dist.get_rank()
    with near():
        with pytest.raises(MismatchError, match="rank 0: 40, rank 1: 44"):
            dist.all_reduce(torch.ones(10 + rank))
        data = torch.ones(3)
        dist.all_reduce(data)
    assert data.tolist() == [2.0] * 3


def test_other_lengths_are_an_error_on_every_rank():
    run_ranks(check_lengths, 2)


def check_failure():
    rank = dist.get_rank()
    data = torch.ones(3)
    with near():
        dist.all_reduce(data)
        gone = OSError(3, "cannot read process 7's memory")
        failing = mock.patch.object(calls, "_read_shares", side_effect=gone if rank == 1 else None)
        with failing, pytest.raises(RankFailedError, match="read") as found:
            dist.all_reduce(data)
        assert ("process 7" in str(found.value)) == (rank == 1)
        data = torch.ones(3)
        dist.all_reduce(data)
    assert data.tolist() == [2.0] * 3


def test_a_rank_that_cannot_read_fails_on_every_rank():
    run_ranks(check_failure, 2)


def check_other_failure():
    rank = dist.get_rank()
    full = RuntimeError("no memory") if rank == 1 else None
    failing = mock.patch.object(calls, "_read_shares", side_effect=full)
    said = pytest.raises(RuntimeError, match="no memory" if rank == 1 else "another rank")
    with near(), failing, said:
        dist.all_reduce(torch.ones(3))
    data = torch.ones(3)
    dist.all_reduce(data)
    assert data.tolist() == [2.0] * 3


def test_any_failure_reaches_every_rank():
    run_ranks(check_other_failure, 2, timeout=20)


def check_refusal():
    refusal, group = OSError(1, "not permitted"), c10d.new_group([0, 1])
    data = torch.ones(3)
    with near(), mock.patch.object(neighbours, "read_into", side_effect=refusal):
        dist.all_reduce(data, group=group)
    assert data.tolist() == [2.0] * 3
    assert info_of(group).memory is None


def test_without_leave_sockets_are_used():
    run_ranks(check_refusal, 2)


def check_variable():
    on, group = "0" if dist.get_rank() == 1 else "1", c10d.new_group([0, 1])
    data = torch.ones(3)
    with near(), mock.patch.dict(os.environ, {"SCALETORCH_SHARED_MEMORY": on}):
        dist.all_reduce(data, group=group)
    assert data.tolist() == [2.0] * 3
    assert info_of(group).memory is None


def test_one_rank_may_refuse():
    run_ranks(check_variable, 2)


def check_end():
    group = c10d.new_group([0, 1])
    with near():
        dist.all_reduce(torch.ones(3), group=group)
    known = weakref.ref(group)
    c10d.destroy_process_group(group)
    del group
    gc.collect()
    assert known() is None


def test_a_group_goes_when_it_is_destroyed():
    run_ranks(check_end, 2)


def check_death():
    if dist.get_rank() == 1:
        os._exit(7)
    with near(), pytest.raises(RuntimeError, match=r"closed by peer|reset by peer"):
        dist.all_reduce(torch.ones(3))


def test_a_rank_that_dies_ends_the_wait():
    with pytest.raises(RankFailedError) as failed:
        run_ranks(check_death, 2)
    assert "rank 0 failed" not in str(failed.value)


def check_many(elements):
    rank = dist.get_rank()
    params = [torch.full((n,), rank + 1.0, dtype=d) for n in elements for d in FLOATS]
    with near(1 << 20):
        dist.all_reduce_params(params, op="mean")
    assert all(bool((each == 1.5).all()) for each in params)


def test_lists_of_large_and_small_tensors():
    run_ranks(check_many, 2, [3, 1000, 1 << 18, 1 << 19])


def test_memory_is_read_in_parts_and_not_beyond():
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    with mock.patch.object(reading, "LONGEST", 8):
        reading.read_into(target[:20], os.getpid(), source.data_ptr())
    assert target[:20].tolist() == source[:20].tolist()
    assert not target[20:].any()


def ways():
    data, group = torch.ones(4), c10d.group.WORLD
    with near():
        return tuple(isinstance(way_of(data, group, later), MemoryWay) for later in (False, True))


def test_calls_that_wait_go_through_memory_and_others_do_not():
    assert run_ranks(ways, 2) == [(True, False)] * 2

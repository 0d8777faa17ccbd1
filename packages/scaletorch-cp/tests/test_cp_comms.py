"""ContextCommunicate: what arrives, in which order, and what misuse says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as c10d

from scaletorch.dist.errors import InvalidArgumentError, NotInGroupError, StateError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.context_parallel import ContextCommunicate


def _once_around(hops):
    comm = ContextCommunicate("ranks", c10d.group.WORLD)
    rank = float(c10d.get_rank())
    small, large = torch.full((2,), rank), torch.full((3, 70_000), rank + 100)
    seen = []
    for _ in range(hops):
        small, large = comm.send_recv(small), comm.send_recv(large)
        comm.commit()
        comm.wait()
        seen.append((small.unique().tolist(), large.unique().tolist()))
    return seen


@pytest.mark.parametrize("size", [2, 3, 4])
def test_tensors_go_round_in_order(size):
    for rank, seen in enumerate(run_ranks(_once_around, size, size)):
        owners = [(rank - hop) % size for hop in range(1, size + 1)]
        assert seen == [([float(o)], [o + 100.0]) for o in owners]


def _into_given_tensor():
    comm = ContextCommunicate("given", c10d.group.WORLD)
    strided = torch.full((4, 3), float(c10d.get_rank())).T
    recv = torch.empty(3, 4)
    before = strided.clone()
    assert comm.send_recv(strided, recv) is recv
    comm.commit()
    comm.wait()
    assert torch.equal(strided, before)
    assert recv.unique().tolist() == [1 - c10d.get_rank()]


@distributed_test(2)
def test_given_tensors_are_received_into():
    with pytest.raises(StateError, match="pass group="):
        ContextCommunicate()
    _into_given_tensor()


def _subgroup_rings():
    rank = c10d.get_rank()
    rings = [c10d.new_group([0, 2]), c10d.new_group([3, 1])]
    mine = rings[rank % 2]
    comm = ContextCommunicate("subgroup", mine)
    got = comm.send_recv(torch.tensor([rank]))
    comm.commit()
    comm.wait()
    try:
        ContextCommunicate("other", rings[1 - rank % 2])
    except NotInGroupError as error:
        return got.item(), str(error)
    return got.item(), None


def test_peers_are_global_ranks_of_the_group():
    results = run_ranks(_subgroup_rings, 4)
    assert [got for got, _ in results] == [2, 3, 0, 1]
    assert all(error for _, error in results)


def test_ring_of_one_receives_a_copy():
    comm = ContextCommunicate()
    sent = torch.arange(3.0)
    got = comm.send_recv(sent)
    comm.commit()
    comm.wait()
    assert torch.equal(got, sent)
    assert got.data_ptr() != sent.data_ptr()


def test_out_of_order_use_raises():
    comm = ContextCommunicate("the ring")
    with pytest.raises(StateError, match=r"'the ring'.*rank 0.*nothing queued: call send_recv"):
        comm.commit()
    with pytest.raises(StateError, match=r"no batch in flight: call commit\(\) first"):
        comm.wait()
    comm.send_recv(torch.ones(1))
    with pytest.raises(StateError, match=r"call commit\(\) first"):
        comm.wait()
    comm.commit()
    with pytest.raises(StateError, match=r"send_recv\(\) while a batch is in flight"):
        comm.send_recv(torch.ones(1))
    with pytest.raises(StateError, match=r"commit\(\) while a batch is in flight"):
        comm.commit()
    comm.wait()
    with pytest.raises(StateError, match="no batch in flight"):
        comm.wait()


@pytest.mark.parametrize(
    "recv", [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(1, 2)]
)
def test_recv_of_another_kind_is_refused(recv):
    with pytest.raises(InvalidArgumentError, match=r"recv must be like .*\[2\] torch.float32"):
        ContextCommunicate().send_recv(torch.ones(2), recv)


def test_recv_in_the_memory_of_the_tensor_is_refused():
    tensor = torch.ones(4)
    with pytest.raises(InvalidArgumentError, match=r"of its own; it is .* in the same memory"):
        ContextCommunicate().send_recv(tensor[:2], tensor[2:])

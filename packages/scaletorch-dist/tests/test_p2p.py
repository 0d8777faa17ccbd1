"""Messages between ranks, singly and in batches."""

import pytest
import torch
import torch.distributed as c10d

import scaletorch.dist as dist
from scaletorch.dist import InvalidArgumentError, NotInGroupError, devices
from scaletorch.dist.testing import distributed_test, run_ranks

DTYPES = (
    torch.float32, torch.bfloat16, torch.int16, torch.uint64, torch.bool, torch.complex64,
    torch.float8_e4m3fn,
)  # fmt: skip


def bits(data):
    return data.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist()


@distributed_test(world_size=2)
def test_send_and_recv_of_every_dtype_and_layout():
    for dtype in DTYPES:
        whole = torch.arange(12).view(3, 4).to(dtype)
        for view in (whole, whole.t(), whole[:, 1], whole[1::2][:1, :1], whole[0, 3], whole[:0]):
            if dist.get_rank() == 0:
                assert dist.send(view, 1) is None
            else:
                target = torch.zeros(2, *view.shape).to(dtype).movedim(0, -1)[..., 1]  # strided
                assert dist.recv(target, 0) is None
                assert bits(target) == bits(view)


@distributed_test(world_size=2)
def test_isend_and_irecv_with_tags():
    if not devices.entry_of_backend(dist.get_backend()).tags:
        for call in (dist.isend, dist.irecv, dist.send, dist.recv):
            with pytest.raises(InvalidArgumentError, match=r"^tag=1: .* has no tags"):
                call(torch.zeros(2), 1 - dist.get_rank(), tag=1)
        return
    if dist.get_rank() == 0:
        works = [dist.isend(torch.full((2,), float(tag)), 1, tag=tag) for tag in range(3)]
    else:
        targets = [torch.zeros(4)[::2] for _ in range(3)]
        works = [dist.irecv(targets[tag], 0, tag=tag) for tag in (2, 0, 1)]
    for work in works:
        assert work.wait() is None
    if dist.get_rank() == 1:
        assert [target.tolist() for target in targets] == [[0, 0], [1, 1], [2, 2]]


@distributed_test(world_size=2)
def test_a_parameter_is_received_into():
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    if dist.get_rank() == 0:
        dist.send(torch.nn.Parameter(torch.ones(2, 2)).t(), 1)
    else:
        dist.recv(parameter, 0)
        assert parameter.tolist() == [[1, 1], [1, 1]]
        assert parameter.is_leaf
        assert parameter.requires_grad


def ring(async_op, count):
    """Every rank sends to its right, large enough that blocking sends in one order would hang."""
    rank, size = dist.get_dist_info()
    data = torch.full((count,), float(rank))
    left, mine = torch.zeros(count), torch.zeros(count)
    sends = [(data, (rank + 1) % size), (data, rank)]
    work = dist.exchange(sends, [(mine, rank), (left, (rank - 1) % size)], async_op=async_op)
    assert (work.wait() if async_op else work) is None
    assert (left == (rank - 1) % size).all()
    assert torch.equal(mine, data)


@pytest.mark.parametrize(("size", "async_op"), [(1, False), (2, True), (3, False)])
def test_exchange_in_a_ring(size, async_op):
    run_ranks(ring, size, async_op, 1 << 18) if size > 1 else ring_of_one()


def ring_of_one():
    target = torch.zeros(2, 2).t()
    assert dist.exchange([(torch.ones(2, 2), 0)], [(target, 0)]) is None
    assert target.tolist() == [[1, 1], [1, 1]]
    assert dist.exchange(async_op=True).wait() is None
    assert dist.exchange() is None


@distributed_test(world_size=2)
def test_messages_of_one_pair_arrive_in_order():
    if dist.get_rank() == 0:
        dist.exchange([(torch.tensor([float(i)]), 1) for i in range(4)])
    else:
        targets = [torch.zeros(1) for _ in range(4)]
        dist.exchange(recvs=[(target, 0) for target in targets])
        assert [int(target) for target in targets] == [0, 1, 2, 3]


@distributed_test(world_size=3)
def test_peers_are_global_ranks_in_a_group():
    pair = c10d.new_group([1, 2])
    rank = dist.get_rank()
    if rank == 0:
        with pytest.raises(NotInGroupError):
            dist.send(torch.ones(1), 1, pair)
        with pytest.raises(NotInGroupError):
            dist.exchange([(torch.ones(1), 1)], group=pair)
        return
    target = torch.zeros(1)
    dist.exchange([(torch.tensor([float(rank)]), 3 - rank)], [(target, 3 - rank)], pair)
    assert target.item() == 3 - rank
    if rank == 1:
        dist.send(target, 2, pair)
    else:
        dist.recv(target, 1, pair)
        assert target.item() == 2
    for call in (dist.send, dist.recv, dist.isend, dist.irecv):
        with pytest.raises(NotInGroupError, match="ranks are 1, 2"):
            call(target, 0, pair)
    with pytest.raises(NotInGroupError, match="src=0"):
        dist.exchange(recvs=[(target, 0)], group=pair)


def refuse():
    x = torch.ones(2)
    rank, size = dist.get_dist_info()
    for call in (dist.send, dist.recv, dist.isend, dist.irecv):
        with pytest.raises(InvalidArgumentError, match="this rank itself"):
            call(x, rank)
        with pytest.raises(NotInGroupError, match=f"={size} is not in the group"):
            call(x, size)
        with pytest.raises(InvalidArgumentError, match="needs a tensor"):
            call([1.0], 0)
    with pytest.raises(InvalidArgumentError, match=r"\(tensor, src\) pairs, got Tensor"):
        dist.exchange(recvs=[x])
    with pytest.raises(InvalidArgumentError, match="entries share memory"):
        dist.recv(torch.ones(1).expand(2), (rank + 1) % size)
    with pytest.raises(InvalidArgumentError, match="entries share memory"):
        dist.exchange([(x, rank)], [(torch.ones(1).expand(2), rank)])
    with pytest.raises(InvalidArgumentError, match="sends to itself"):
        dist.exchange([(x, rank)], [(torch.ones(3), rank)])
    with pytest.raises(InvalidArgumentError, match="sends to itself"):
        dist.exchange([(x, rank)])
    if size > 1:
        for tag in ("a", -1):
            with pytest.raises(InvalidArgumentError, match="tag must be a number of at least 0"):
                dist.send(x, 1 - rank, tag=tag)
        with pytest.raises(InvalidArgumentError, match="128 messages at once, got 100 sends"):
            dist.exchange([(x, 1 - rank)] * 100, [(x, 1 - rank)] * 100)


@pytest.mark.parametrize("size", [0, 2])
def test_bad_arguments(size):
    run_ranks(refuse, size) if size else refuse()

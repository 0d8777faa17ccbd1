"""Messages between ranks, singly and in batches."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as c10d

import scaletorch.dist as dist
from scaletorch.dist import InvalidArgumentError, NotInGroupError, devices
from scaletorch.dist.collectives.batches import MOST, batches
from scaletorch.dist.testing import distributed_test, run_ranks

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int16,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)


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
    work = dist.exchange(
        [(data, (rank + 1) % size), (data, rank)],
        [(mine, rank), (left, (rank - 1) % size)],
        async_op=async_op,
    )
    assert (work.wait() if async_op else work) is None
    assert (left == (rank - 1) % size).all()
    assert torch.equal(mine, data)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
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


def exchange_many(each):
    """Rank r sends rank s messages of more than one size, `each[r][s]` of them."""
    rank, size = dist.get_dist_info()
    longest, batch = [], c10d.batch_isend_irecv

    def batched(operations):
        longest.append(len(operations))
        return batch(operations)

    def message(source, target, k):
        return torch.full((1 + k % 3,), float(100000 * source + 10000 * target + k))

    others = [other for other in range(size) if other != rank]
    sends = [(message(rank, to, k), to) for to in others for k in range(each[rank][to])]
    recvs = [
        (torch.zeros(1 + k % 3), source) for source in others for k in range(each[source][rank])
    ]
    with patch.object(c10d, "batch_isend_irecv", batched):
        dist.exchange(sends, recvs)
    arrived = iter(recvs)
    for source in others:
        for k in range(each[source][rank]):
            assert torch.equal(next(arrived)[0], message(source, rank, k))
    assert sum(longest) == len(sends) + len(recvs)
    assert max(longest) <= MOST
    return len(longest)


def test_many_messages_go_in_several_batches():
    both = run_ranks(exchange_many, 2, [[0, 150], [140, 0]])
    assert both == [3, 3]
    # The first rank alone has to cut: the others have no more than fit into one batch.
    assert run_ranks(exchange_many, 3, [[0, 60, 60], [50, 0, 1], [50, 9, 0]]) == [2, 1, 1]


def plan_all(size, counts):
    """Return each rank's batches of (source, target, k) where r sends s `counts(r, s)` messages."""
    plans = []
    for rank in range(size):
        ends = [
            (c10d.isend, to, (rank, to, k))
            for to in range(size) if to != rank for k in range(counts(rank, to))
        ] + [
            (c10d.irecv, source, (source, rank, k))
            for source in range(size) if source != rank for k in range(counts(source, rank))
        ]  # fmt: skip
        operations = [SimpleNamespace(op=op, group_peer=peer) for op, peer, _ in ends]
        found = list(batches(operations, rank, size))
        assert sorted(i for batch in found for i in batch) == list(range(len(ends)))
        assert all(0 < len(batch) <= MOST for batch in found)
        plans.append([{ends[i][2] for i in batch} for batch in found])
    return plans


def run_plans(plans):
    """Run batches as a device does: a batch ends when each of its messages is at both heads."""
    heads = [0] * len(plans)
    left = [set(plan[0]) for plan in plans]
    while any(left):
        done = {m for rank in left for m in rank if m in left[m[0]] and m in left[m[1]]}
        assert done, "a deadlock"
        for rank, plan in enumerate(plans):
            left[rank] -= done
            while not left[rank] and heads[rank] + 1 < len(plan):
                heads[rank] += 1
                left[rank] = set(plan[heads[rank]])


@pytest.mark.parametrize(
    ("size", "counts"),
    [
        (3, lambda r, s: 200),
        (9, lambda r, s: 20 + 7 * r - s),
        (9, lambda r, s: 100 if s == 0 else 1),
        (66, lambda r, s: 1 + (r < 3)),
        (140, lambda r, s: 1),
        (140, lambda r, s: 2 if s == 1 else (r + s) % 5 == 0),
    ],
)
def test_batches_end_on_every_rank(size, counts):
    run_plans(plan_all(size, counts))


def test_batches_in_the_order_of_the_lists_would_deadlock():
    in_order = [
        [{(0, 1, 0), (0, 2, 0)}, {(1, 0, 0), (2, 0, 0)}],
        [{(1, 2, 0), (1, 0, 0)}, {(2, 1, 0), (0, 1, 0)}],
        [{(2, 0, 0), (2, 1, 0)}, {(0, 2, 0), (1, 2, 0)}],
    ]
    with pytest.raises(AssertionError, match="a deadlock"):
        run_plans(in_order)


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


@pytest.mark.parametrize("size", [0, 1, 2])
def test_bad_arguments(size):
    run_ranks(refuse, size) if size else refuse()

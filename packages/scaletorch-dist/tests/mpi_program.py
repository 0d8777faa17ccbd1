"""What ranks of mpirun do; `test_mpi_backend.py` starts it with names of functions."""

import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as c10d

sys.path.insert(0, str(Path(__file__).parent))

import every_backend

import scaletorch.dist as dist
from scaletorch.dist.wire.backend import all_gather_single, reduce_scatter_single

ROUNDS = 3


def bodies():
    """The tests of gloo's ranks."""
    every_backend.run_all()


def wrappers():
    """DistributedDataParallel, device meshes, DTensors, groups made by their members alone."""
    every_backend.train_with_ddp("cpu")
    every_backend.use_device_mesh("cpu")


def torch_calls():
    """What the bodies of gloo's tests do not ask of torch itself."""
    rank, size = dist.get_dist_info()
    check_collectives(rank, size)
    check_uneven(rank, size)
    check_messages(rank, size)
    check_handles(rank, size)


def check_collectives(rank, size):
    for dtype in (torch.float32, torch.bfloat16, torch.int16):
        column = torch.zeros(2, 2, dtype=dtype)  # strided: its neighbours stay
        column[:, 1] = rank + 1
        c10d.all_reduce(column[:, 1])
        total = size * (size + 1) // 2
        assert column.tolist() == [[0, total]] * 2
        mean = torch.tensor([rank + 1], dtype=dtype)
        c10d.all_reduce(mean, c10d.ReduceOp.AVG)
        rounding = None if dtype.is_floating_point else "trunc"
        expected = torch.div(torch.tensor([total], dtype=dtype), size, rounding_mode=rounding)
        assert mean.equal(expected), dtype
        output = torch.zeros(2, dtype=dtype)
        sent = torch.arange(size, dtype=dtype).repeat_interleave(2)
        reduce_scatter_single(output, sent)
        assert output.tolist() == [rank * size] * 2
    flag = torch.tensor([rank == 1, True])
    c10d.all_reduce(flag)
    assert flag.view(torch.uint8).tolist() == [1, 1]
    joined = torch.empty(size, dtype=torch.float8_e5m2)
    all_gather_single(joined, torch.tensor([float(rank)]).to(torch.float8_e5m2))
    assert joined.float().tolist() == list(range(size))
    objects = [None] * size
    c10d.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]


def check_uneven(rank, size):
    """Rank r sends r + i + 1 elements to rank i."""
    sent = [r + 1 for r in range(rank, rank + size)]
    data = torch.full((sum(sent), 2), float(rank))
    output = torch.empty(sum(sent), 2)  # as many come: it is symmetric
    c10d.all_to_all_single(output, data, sent, sent)
    assert output[:, 0].tolist() == [float(r) for r in range(size) for _ in range(sent[r])]
    received = [torch.empty(r + rank + 1, dtype=torch.int16) for r in range(size)]
    c10d.all_to_all(received, [torch.full((n,), rank, dtype=torch.int16) for n in sent])
    assert [set(x.tolist()) for x in received] == [{r} for r in range(size)]
    lengths = [torch.empty(r + 1) for r in range(size)]
    c10d.all_gather(lengths, torch.full((rank + 1,), float(rank)))
    assert [set(x.tolist()) for x in lengths] == [{float(r)} for r in range(size)]
    outputs, inputs = torch.zeros(rank + 1), [torch.ones(r + 1) for r in range(size)]
    c10d.reduce_scatter(outputs, inputs)
    assert outputs.tolist() == [size] * (rank + 1)


def check_messages(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    works = [c10d.isend(torch.tensor([rank, tag]), right, tag=tag) for tag in range(ROUNDS)]
    for tag in reversed(range(ROUNDS)):
        data = torch.zeros(2, dtype=torch.int64)
        c10d.irecv(data, left, tag=tag).wait()
        assert data.tolist() == [left, tag]
    [work.wait() for work in works]
    batch = torch.zeros(1 << 18)
    operations = [
        c10d.P2POp(c10d.isend, torch.full_like(batch, float(rank)), right),
        c10d.P2POp(c10d.irecv, batch, left),
    ]
    [work.wait() for work in c10d.batch_isend_irecv(operations)]
    assert (batch == left).all()


def check_handles(rank, size):
    data = torch.ones(1 << 20)
    works = [c10d.all_reduce(data[i::4], async_op=True) for i in range(4)]
    future = works[0].get_future()
    assert future.wait()[0].data_ptr() == data.data_ptr()
    [work.wait() for work in reversed(works)]
    assert all(work.is_completed() for work in works)
    assert (data == size).all()
    work = c10d.all_reduce(data, async_op=True)
    del work  # the call goes on
    c10d.barrier()
    c10d.barrier()
    assert data[0] == size * size


def groups():
    """Groups of some ranks at once, in the order of their ranks, with a timeout of their own."""
    rank, size = dist.get_dist_info()
    for members in ([0], [0, 1], list(range(size - 2, size)), list(range(size))):
        group = c10d.new_group(members, timeout=timedelta(seconds=30))
        if rank in members:
            data = torch.tensor([rank])
            c10d.broadcast(data, members[-1], group)
            assert data.item() == members[-1]
            assert dist.all_gather_object(rank, group) == members
            assert dist.get_timeout(group) == timedelta(seconds=30)
            assert dist.get_backend(group) == "mpi4py"
    for _ in range(ROUNDS):
        some = c10d.new_group([0, size - 1])
        if rank in (0, size - 1):
            c10d.destroy_process_group(some)


def refuse(message, call, *args, **kwargs):
    with pytest.raises((ValueError, RuntimeError), match=message):
        call(*args, **kwargs)


def errors():
    """What does not fit is an error and harms nothing."""
    rank, _ = dist.get_dist_info()
    text = "cannot reduce torch.float32 with op 'band'"
    refuse(text, c10d.all_reduce, torch.ones(1), c10d.ReduceOp.BAND)
    refuse("cannot reduce torch.float8", c10d.all_reduce, torch.ones(1).to(torch.float8_e5m2))
    refuse("does not fit an output", all_gather_single, torch.empty(3), torch.ones(2))
    if rank == 0:
        c10d.send(torch.ones(2), 1)
    elif rank == 1:
        refuse("8 bytes from rank 0 of the group came where 16", c10d.recv, torch.zeros(4), 0)
    dist.barrier()
    dist.cleanup_dist()
    with warnings.catch_warnings(action="ignore"):
        dist.init_dist("mpi", backend="cpu:mpi,cuda:nccl")  # no CUDA here: gloo instead
    data = torch.ones(1)
    dist.all_reduce(data)
    assert (dist.get_backend(), data.item()) == ("gloo", dist.get_world_size())


def checks():
    """Ranks that make different calls are told so, by comparison over MPI; messages pass."""
    dist.check_collectives(True)
    rank = dist.get_rank()
    refuse("ranks make different calls", dist.all_reduce, torch.ones(1 + rank))
    if rank < 2:
        message = torch.full((2,), float(rank))
        (dist.send if rank == 0 else dist.recv)(message, 1 - rank)
        assert message.tolist() == [0, 0]
    dist.check_collectives(False)
    dist.barrier()


def late():
    """A rank that never comes: the others are told so within the timeout, and the job ends."""
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        time.sleep(100)
        sys.stderr.write("slept to the end\n")


def fail():
    """A rank that raises where another waits for it."""
    if dist.get_rank() == 0:
        raise RuntimeError("this rank has had enough")
    dist.barrier()


def nothing():
    """A good end."""


def main(names, timeout, ending):
    dist.init_dist("mpi", backend="mpi", timeout=timeout)
    assert dist.get_backend() == "mpi4py"
    for name in names.split(","):
        globals()[name]()
    sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()} did {names}\n")
    sys.stdout.flush()
    dist.cleanup_dist()
    if ending != "nothing":
        dist.init_dist("mpi", backend="mpi", timeout=3)
    globals()[ending]()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3])

"""Tensors of an accelerator on a group of gloo: copied to the CPU and back."""

import pytest
import torch

import scaletorch.dist as dist
from scaletorch.dist import functional as F
from scaletorch.dist.testing import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(*values):
    return torch.tensor(values, device="cuda:0")


def reduce_on_gpu():
    rank = dist.get_rank()
    for async_op in (False, True):
        data = torch.zeros(2, 2, device="cuda:0")[:, 1].fill_(rank + 1.0)
        work = dist.all_reduce(data, "mean", async_op=async_op)
        assert work is None or work.wait() is None
        assert data.is_cuda
        assert data.tolist() == [1.5, 1.5]
    data = on_gpu(rank)
    dist.reduce(data, 1, "max")
    assert data.item() == rank
    output = on_gpu(0)
    dist.reduce_scatter(output, [on_gpu(rank), on_gpu(5)], "sum")
    assert output.item() == (1, 10)[rank]
    dist.all_reduce_dict({"a": data, "b": (host := torch.tensor(1.0))})
    assert (data.item(), host.item()) == (1, 2)
    dist.all_reduce_params([data, host], op="max")


def move_on_gpu():
    rank = dist.get_rank()
    for parts in (
        dist.all_gather(on_gpu(rank)),
        dist.all_gather(on_gpu(rank), async_op=True).wait(),
        dist.gather(on_gpu(rank)),
    ):
        assert all(part.is_cuda for part in parts)
        assert [int(part) for part in parts] in ([0, 1], [])
    data = on_gpu(rank, 5)
    dist.broadcast(data, 1)
    assert data.tolist() == [1, 5]
    dist.scatter(data, [on_gpu(1, 2), on_gpu(3, 4)] if rank == 0 else None)
    assert data.tolist() == [[1, 2], [3, 4]][rank]
    swapped = dist.all_to_all(on_gpu(rank, 10 + rank))
    assert swapped.is_cuda
    assert swapped.tolist() == [[0, 1], [10, 11]][rank]
    received = [on_gpu(0), on_gpu(0)]
    dist.all_to_all([on_gpu(rank), on_gpu(rank)], received)
    assert [int(part) for part in received] == [0, 1]
    target = on_gpu(9)
    dist.exchange([(on_gpu(rank), 1 - rank)], [(target, 1 - rank)])
    assert target.item() == 1 - rank
    objects = dist.all_gather_object(on_gpu(rank))
    assert [int(one) for one in objects] == [0, 1]


def differentiate_on_gpu():
    rank = dist.get_rank()
    calls = (
        F.copy,
        F.reduce,
        F.all_reduce,
        lambda x: F.all_gather(x, 1),
        lambda x: F.gather(x, 0),
        lambda x: F.split(x, 1),
        lambda x: F.reduce_scatter(x, 1),
        lambda x: F.all_to_all(x, 0, 1),
        lambda x: F.gather(x, 1, sizes=(4, 4)),
    )
    for call in calls:
        results = []
        for device in ("cpu", "cuda:0"):
            x = (torch.arange(8.0, device=device).view(2, 4) + rank).requires_grad_()
            y = call(x)
            y.square().sum().backward()
            assert x.grad.device == y.device == x.device
            results.append((y.tolist(), x.grad.tolist()))
        assert results[0] == results[1]


@pytest.mark.parametrize("body", [reduce_on_gpu, move_on_gpu, differentiate_on_gpu])
def test_tensors_of_a_gpu_on_gloo(body):
    run_ranks(body, 2)

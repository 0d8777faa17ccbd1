"""The older names: regions and linear functions."""

import pytest
import torch
import torch.distributed
from torch.distributed import group
from torch.utils._python_dispatch import TorchDispatchMode

from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.parallel.tensor_parallel.tp_comms import (
    CopyToModelParallelRegion,
    GatherFromModelParallelRegion,
    ReduceFromModelParallelRegion,
    linear_with_all_reduce,
    linear_with_async_all_reduce,
)


@distributed_test(world_size=2)
def test_regions_default_to_the_tensor_parallel_axis():
    rank = torch.distributed.get_rank()
    setup_process_group_manager(tp_size=2)
    for region, expected, expected_grad in (
        (CopyToModelParallelRegion, [rank, 1.0], [3.0, 3.0]),
        (ReduceFromModelParallelRegion, [1.0, 2.0], [rank + 1.0] * 2),
        (GatherFromModelParallelRegion, [0.0, 1.0, 1.0, 1.0], [rank + 1.0] * 2),
    ):
        x = torch.tensor([float(rank), 1.0], requires_grad=True)
        kept = x.detach().clone()
        for arguments in ((x,), (x, group.WORLD)):
            out = region.apply(*arguments)
            assert out.tolist() == expected
            x.grad = None
            (out * (rank + 1)).sum().backward()
            assert x.grad.tolist() == expected_grad
            assert torch.equal(x.detach(), kept)
    destroy_process_group_manager()


def test_regions_are_the_identity_in_one_process():
    for region in (
        CopyToModelParallelRegion,
        ReduceFromModelParallelRegion,
        GatherFromModelParallelRegion,
    ):
        x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(region.apply, (x,))
        assert torch.equal(region.apply(x), x)


def overlapped(shape, bias, frozen, needs_input_grad, autocast):
    """Both linear functions, every output and gradient."""
    results = []
    for linear in (linear_with_all_reduce, linear_with_async_all_reduce):
        torch.manual_seed(4)
        x = torch.randn(shape, requires_grad=needs_input_grad)
        torch.manual_seed(torch.distributed.get_rank())
        weight = torch.randn(3, shape[-1], requires_grad=not frozen)
        offset = torch.randn(3, requires_grad=True) if bias else None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = linear(x, weight, offset, group.WORLD)
        if out.requires_grad:
            torch.manual_seed(6)
            out.backward(torch.randn_like(out))
        leaves = [x, weight] + ([offset] if bias else [])
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return results


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5)])
@pytest.mark.parametrize(
    ("bias", "frozen", "needs_input_grad"),
    [(True, False, True), (False, True, True), (True, False, False), (False, False, True)],
)
def test_overlapped_linear_is_the_plain_one(shape, bias, frozen, needs_input_grad, autocast):
    arguments = (shape, bias, frozen, needs_input_grad, autocast)
    for expected, got in run_ranks(overlapped, 2, *arguments):
        for one, other in zip(expected, got, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.dtype == other.dtype
                torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)


class Sent(TorchDispatchMode):
    """Names of the backend's operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("linear", [linear_with_all_reduce, linear_with_async_all_reduce])
@distributed_test(world_size=1)
def test_one_rank_sends_nothing(linear):
    x, weight = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    with Sent() as sent:
        out = linear(x, weight, None, group.WORLD)
        out.sum().backward()
    assert torch.equal(out, x @ weight.t())
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, 3))
    assert sent.names == []

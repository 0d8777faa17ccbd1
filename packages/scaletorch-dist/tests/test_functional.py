"""The differentiable collectives against one process in float64.

Reference: the inputs of all ranks in one process, and the collective as plain tensor code on them.
For the adjoint calls the loss is the sum of the ranks' losses; for the others every rank computes
the same loss, and the gradient is that of one of them.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as c10d
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import scaletorch.dist as dist
from scaletorch.dist import InvalidArgumentError, NotInGroupError
from scaletorch.dist import functional as F
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.dist.wire.backend import Route
from scaletorch.dist.world.info import info_of


def ranks_inputs(size, shape, seed=0):
    """Inputs of all ranks; lengths along a dim may differ: shape is one per rank then."""
    generator = torch.Generator().manual_seed(seed)
    shapes = shape if isinstance(shape, list) else [shape] * size
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def weight_of(shape, seed):
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def loss_of(y, rank):
    """A loss whose gradient depends on y and differs from rank to rank."""
    return (y.sin() * weight_of(y.shape, rank)).sum()


# Each entry: the call on this rank, and the same on the list of all ranks' inputs.
ADJOINT = {
    "all_reduce": (lambda x, **_: F.all_reduce(x), lambda xs, **_: [sum(xs)] * len(xs)),
    "all_gather": (
        lambda x, dim, **_: F.all_gather(x, dim),
        lambda xs, dim, **_: [torch.cat(xs, dim)] * len(xs),
    ),
    "reduce_scatter": (
        lambda x, dim, **_: F.reduce_scatter(x, dim),
        lambda xs, dim, **_: list(sum(xs).chunk(len(xs), dim)),
    ),
    "all_to_all": (
        lambda x, dim, to: F.all_to_all(x, dim, to),
        lambda xs, dim, to: [
            torch.cat([x.chunk(len(xs), dim)[r] for x in xs], to) for r in range(len(xs))
        ],
    ),
}


def run_adjoint(name, xs, dim, to):
    x = xs[dist.get_rank()].clone().requires_grad_()
    y = ADJOINT[name][0](x, dim=dim, to=to)
    (grad,) = torch.autograd.grad(loss_of(y, dist.get_rank()), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x)
    return y.detach(), grad.detach(), second


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(sorted(ADJOINT)),
    lengths=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    size=st.sampled_from((2, 3)),
    draw=st.data(),
)
def test_adjoint_calls_match_one_process(name, lengths, size, draw):
    dim = draw.draw(st.integers(-len(lengths), len(lengths) - 1), "dim")
    to = draw.draw(st.integers(-len(lengths), len(lengths) - 1), "to")
    lengths[dim] *= size
    xs = ranks_inputs(size, tuple(lengths))
    results = run_ranks(run_adjoint, size, name, xs, dim, to)
    leaves = [x.clone().requires_grad_() for x in xs]
    ys = ADJOINT[name][1](leaves, dim=dim, to=to)
    loss = sum(loss_of(y, rank) for rank, y in enumerate(ys))
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    seconds = torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)
    for found, expected in zip(results, zip(ys, grads, seconds, strict=True), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def region(x, weight):
    """A column-parallel then row-parallel product, as a pair of `copy` and `reduce`."""
    rows = F.split(weight, 0)
    return F.reduce(F.copy(x) @ rows.t().contiguous() @ rows)


@distributed_test(world_size=2)
def test_copy_and_reduce_bound_a_parallel_region():
    (x, weight), rank = ranks_inputs(2, [(3, 4), (6, 4)]), dist.get_rank()
    inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    y = region(*inputs)
    loss_of(y, 0).backward()
    alone = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = alone[0] @ alone[1].t() @ alone[1]
    loss_of(expected, 0).backward()
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for mine, other in zip(inputs, alone, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)
    assert torch.equal(inputs[0], x)
    assert rank in (0, 1)


@pytest.mark.parametrize("sizes", [(1, 4, 2), (0, 3, 1), [5, 0, 0], (0, 0, 0), (1, 1, 1), None])
@pytest.mark.parametrize("dim", [0, 1, -1])
@distributed_test(world_size=3)
def test_even_and_uneven_shards(sizes, dim):
    rank = dist.get_rank()
    lengths = [2, 2, 2] if sizes is None else list(sizes)
    shape = [2, 2, 2]
    shape[dim] = sum(lengths)
    whole = ranks_inputs(1, tuple(shape))[0]
    x = whole.clone().requires_grad_()
    shard = F.split(x, dim, sizes=sizes)
    assert torch.equal(shard, whole.split(lengths, dim)[rank])
    y = F.gather(shard, dim, sizes=sizes)
    assert torch.equal(y, whole)
    loss_of(y, 0).backward()
    torch.testing.assert_close(x.grad, whole.cos() * weight_of(whole.shape, 0))
    x = whole.clone().requires_grad_()
    shard = F.reduce_scatter(x * (rank + 1), dim, sizes=sizes)
    torch.testing.assert_close(shard, 6 * whole.split(lengths, dim)[rank])
    y = F.all_gather(shard, dim, sizes=sizes)
    torch.testing.assert_close(y, 6 * whole)
    assert y.is_contiguous()
    if dim:  # else it is a view, which autograd lets nobody change in place
        y += 1
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 3.0 * (rank + 1)))


# Every call, on an input of shape (4, 6); for ranks that must not change it.
CALLS = {
    "copy": F.copy,
    "reduce": F.reduce,
    "all_reduce": F.all_reduce,
    "all_gather": lambda x, g=None: F.all_gather(x, 1, g),
    "reduce_scatter": lambda x, g=None: F.reduce_scatter(x, 1, g),
    "gather": lambda x, g=None: F.gather(x, 0, g),
    "split": lambda x, g=None: F.split(x, 0, g),
    "all_to_all": lambda x, g=None: F.all_to_all(x, 0, 1, g),
}
CLASSES = {
    "copy": F.Copy.apply,
    "reduce": F.Reduce.apply,
    "all_reduce": F.AllReduce.apply,
    "all_gather": lambda x: F.AllGather.apply(x, 1),
    "reduce_scatter": lambda x: F.ReduceScatter.apply(x, 1, None),
    "gather": lambda x: F.Gather.apply(x, 0, None, None),
    "split": lambda x: F.Split.apply(x, 0),
    "all_to_all": lambda x: F.AllToAll.apply(x, 0, 1),
}


def check_inputs_unchanged():
    for name, call in CALLS.items():
        whole = ranks_inputs(1, (6, 4), dist.get_rank())[0]
        x = whole.t().requires_grad_()  # column-major
        first = call(x)
        second = call(x)
        assert torch.equal(x, whole.t()), name
        assert torch.equal(first, second), name
        assert torch.equal(CLASSES[name](x), first), name
        if name != "copy" and dist.get_world_size() > 1:
            assert first.data_ptr() != x.data_ptr(), name
        grad = torch.ones(1, dtype=torch.float64).expand(first.shape)
        (one,) = torch.autograd.grad(first, x, grad)
        assert torch.equal(grad, torch.ones_like(first))
        (other,) = torch.autograd.grad(second, x, torch.ones_like(second))
        assert torch.equal(one, other), name
        assert torch.equal(x, whole.t()), name
    for call in (*CALLS.values(), *CLASSES.values()):  # a gradient that is handed on is not kept
        x = torch.zeros(4, 6, requires_grad=True)
        grad = torch.ones_like(call(x))
        for _ in range(2):
            call(x).backward(grad)
        assert torch.equal(grad, torch.ones_like(grad))
        assert x.grad.data_ptr() != grad.data_ptr()


@pytest.mark.parametrize("size", [0, 2])
def test_inputs_and_gradients_are_never_changed(size):
    run_ranks(check_inputs_unchanged, size) if size else check_inputs_unchanged()


@distributed_test(world_size=2)
def test_inside_checkpoint():
    for name, call in CALLS.items():
        x = ranks_inputs(1, (4, 6), dist.get_rank())[0].requires_grad_()

        def body(x, call=call):
            return call(x.sin()).square()

        loss_of(body(x), 0).backward()
        plain = x.grad
        for reentrant in (True, False):
            x.grad = None
            loss_of(checkpoint(body, x, use_reentrant=reentrant), 0).backward()
            assert torch.equal(plain, x.grad), name


@distributed_test(world_size=2)
def test_dtypes_are_kept():
    rank = dist.get_rank()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.complex64):
        x = torch.full((2, 2), rank + 1.0, dtype=dtype, requires_grad=True)
        for name, call in CALLS.items():
            y = call(x)
            assert y.dtype == dtype
            y.abs().sum().backward()
            assert x.grad.dtype == dtype, name
            x.grad = None
    for dtype in (torch.bool, torch.int16, torch.int64):
        mask = torch.tensor([[rank, 1], [0, 1]]).to(dtype)
        assert F.all_gather(mask, 0).tolist() == [[0, 1], [0, 1], [1, 1], [0, 1]]
        assert F.all_to_all(mask, 0, 1).dtype == dtype
        expected = [[True, True], [False, True]] if dtype == torch.bool else [[1, 2], [0, 2]]
        assert F.reduce(mask).tolist() == expected
        assert F.reduce_scatter(mask, 0).tolist() == [expected[rank]]


@distributed_test(world_size=2)
def test_no_grad_records_nothing():
    x = torch.ones(2, 4, requires_grad=True)
    with torch.no_grad():
        assert all(y is x or not y.requires_grad for y in (call(x) for call in CALLS.values()))
    assert not F.all_reduce(torch.ones(2)).requires_grad


def check_alone(group=None):
    x = torch.arange(24.0).view(4, 6).requires_grad_()
    for call in CALLS.values():
        assert call(x, group) is x
    for name, call in CLASSES.items() if group is None else ():
        y = call(x)
        assert torch.equal(y, x), name
        y.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x)), name
        x.grad = None
    assert torch.equal(F.gather(x, 0, group, sizes=[4]), x)


def check_alone_in_a_group():
    check_alone([c10d.new_group([rank]) for rank in range(2)][dist.get_rank()])
    group = c10d.new_group([0])
    for call in CALLS.values() if dist.get_rank() else ():
        with pytest.raises(NotInGroupError):
            call(torch.ones(4, 6), group)


def test_one_rank_does_nothing():
    check_alone()
    run_ranks(check_alone, 1)
    run_ranks(check_alone_in_a_group, 2)


def check_bad_arguments():
    x = torch.ones(3, 4)
    size = dist.get_world_size()
    for call in (F.all_gather, F.gather, F.split, F.reduce_scatter):
        with pytest.raises(InvalidArgumentError, match=r"dim 2 does not exist .* \(3, 4\)"):
            call(x, 2)
        with pytest.raises(InvalidArgumentError, match="one length of 0 or more for each"):
            call(x, 0, sizes=[1] * (size + 1))
        with pytest.raises(InvalidArgumentError, match="but dim 0"):
            call(x, 0, sizes=[7] * size)
    for call in (F.copy, F.reduce, F.all_reduce):
        with pytest.raises(InvalidArgumentError, match="expected a tensor, got list"):
            call([1.0])
    with pytest.raises(InvalidArgumentError, match="dim -3"):
        F.all_to_all(x, 0, -3)
    if size == 2:
        for call in (F.split, F.reduce_scatter):
            with pytest.raises(InvalidArgumentError, match="not a multiple of 2: pad it or pass"):
                call(x, 0)
        with pytest.raises(InvalidArgumentError, match="not a multiple of 2: pad it"):
            F.all_to_all(x, 0, 1)


def test_bad_arguments():
    check_bad_arguments()
    run_ranks(check_bad_arguments, 2)


@pytest.mark.parametrize("lacks", [("sum",), ("sum", "reduce_scatter")])
@distributed_test(world_size=2)
def test_a_backend_may_lack_sums(lacks):
    size, rank, info = dist.get_world_size(), dist.get_rank(), info_of(c10d.group.WORLD)
    info.ways.clear()
    info.routes["cpu"] = Route("other", frozenset(lacks), True)
    everyones = [torch.arange(4.0 * size).view(2, 2 * size) * (one + 1) for one in range(size)]
    x, summed = everyones[rank].clone().requires_grad_(), sum(everyones)
    with mock.patch.object(c10d, "all_reduce", side_effect=AssertionError("it has no sum")):
        assert torch.equal(F.reduce(x), summed)
        assert torch.equal(F.reduce_scatter(x, 1), summed.chunk(size, 1)[rank])
        (F.all_reduce(x) + F.copy(x)).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 2 * size))
    info.routes.clear()
    info.ways.clear()


def added_to():
    gradients = []
    for dim in (0, 1, -1):
        x = torch.ones(4, 6, dtype=torch.float64, requires_grad=True)
        y = F.reduce_scatter(x, dim)
        y += 1  # as a model may, to what it takes for its own
        y.square().sum().backward()
        gradients.append(x.grad.unique().tolist())
    return gradients


def test_a_piece_of_a_sum_may_be_added_to_in_place():
    assert run_ranks(added_to, 2) == [[[6.0]] * 3] * 2

"""The tensor collectives on real ranks and on one process."""

import functools
import operator
from itertools import product

import pytest
import torch
import torch.distributed as c10d
from torch import nn
from torch.distributed import ReduceOp

import scaletorch.dist as dist
from scaletorch.dist import InvalidArgumentError, MismatchError, NotInGroupError, functional
from scaletorch.dist.building import all_to_all_flat
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.dist.wire.backend import Route
from scaletorch.dist.wire.recipes import as_one
from scaletorch.dist.world.info import info_of

OPS = ("sum", "mean", "product", "min", "max", "band", "bor", "bxor")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (
    torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
)  # fmt: skip
COMPLEX = (torch.complex64, torch.complex128)
OTHERS = (torch.bool, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)
MOVED = (*FLOATS, *INTEGERS, *COMPLEX, *OTHERS)


def values(rank, dtype, shape=(3, 4)):
    """Small whole numbers that differ from rank to rank, exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def bits(data):
    return data.contiguous().view(torch.uint8).tolist()


STEPS = {
    "sum": operator.add, "mean": operator.add, "product": operator.mul, "min": min, "max": max,
    "band": operator.and_, "bor": operator.or_, "bxor": operator.xor,
}  # fmt: skip


def reference(op, rows, dtype):
    """The reduction in plain Python."""
    flat = [row.flatten().tolist() for row in rows]
    columns = [functools.reduce(STEPS[op], column) for column in zip(*flat, strict=True)]
    if op == "mean":
        columns = [value / len(rows) for value in columns]
    if dtype in INTEGERS or dtype == torch.bool:
        columns = [int(value) for value in columns]
    return torch.tensor(columns).to(dtype).view(rows[0].shape)


def reduce_every_way(dtype, op):
    """all_reduce, reduce and reduce_scatter of one dtype; returns what was wrong."""
    rank, size = dist.get_dist_info()
    rows = [values(r, dtype) for r in range(size)]
    expected = reference(op, rows, dtype)
    for layout in ("plain", "column-major", "strided"):
        data = in_layout(rows[rank], layout)
        assert dist.all_reduce(data, op) is None
        check(data, expected)
    data = rows[rank].clone()
    dist.reduce(data, 1, op)
    check(data, expected if rank == 1 else rows[rank])
    output = torch.zeros_like(rows[0])
    entries = [values(rank * size + r, dtype) for r in range(size)]
    before = [entry.clone() for entry in entries]
    assert dist.reduce_scatter(output, entries, op) is None
    mine = [values(r * size + rank, dtype) for r in range(size)]
    check(output, reference(op, mine, dtype))
    assert all(map(torch.equal, entries, before))


def check(result, expected):
    # Only a mean of three is not exact.
    torch.testing.assert_close(result, expected)


def in_layout(data, layout):
    if layout == "column-major":
        return torch.empty(data.shape[::-1], dtype=data.dtype).t().copy_(data)
    if layout == "strided":
        wide = torch.zeros((*data.shape, 2), dtype=data.dtype)
        return wide[..., 1].copy_(data)
    return data.clone()


def all_dtypes_and_ops(size):
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX, torch.bool):
        for op in OPS:
            if (dtype in FLOATS and op[0] == "b") or (dtype in COMPLEX and op not in OPS[:2]):
                continue
            reduce_every_way(dtype, op)


@pytest.mark.parametrize("size", [2, 3])
def test_every_dtype_op_and_layout_reduces_right(size):
    run_ranks(all_dtypes_and_ops, size, size)


@distributed_test(world_size=2)
def test_all_reduce_in_place_on_views_scalars_and_empty_tensors():
    wide = torch.zeros(4, 2)
    dist.all_reduce(wide[:, 0].add_(1))
    assert wide.tolist() == [[2.0, 0.0]] * 4
    scalar = torch.tensor(1.0)
    dist.all_reduce(scalar)
    assert scalar.item() == 2
    for shape in ((0,), (2, 0), (0, 3)):
        dist.all_reduce(torch.empty(shape))
        dist.broadcast(torch.empty(shape))
        assert [t.shape for t in dist.all_gather(torch.empty(shape))] == [torch.Size(shape)] * 2
    one = torch.arange(6.0)[1::4][:1]  # one element that claims to be contiguous, stride 4
    dist.all_reduce(one)
    assert one.item() == 2
    thin = torch.ones(6).as_strided((3, 1, 2), (1, 0, 3))  # an axis of one entry has any stride
    dist.all_reduce(thin)
    assert (thin == 2).all()
    for lazy, total in (
        (torch.tensor([1 + 2j]).conj(), 2 - 4j),
        (torch.tensor([2j]).conj().imag, -4),
    ):
        dist.all_reduce(lazy)
        assert lazy.item() == total


@distributed_test(world_size=2)
def test_leaves_that_require_grad_are_changed_and_record_nothing():
    layer = nn.Linear(3, 2, dtype=torch.float64)
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
        dist.all_reduce(parameter, "mean")
        dist.all_reduce(parameter)
        dist.broadcast(parameter, 1)
        dist.reduce(parameter, 0)
        dist.scatter(parameter, [torch.full_like(parameter, 3.0)] * 2, 1)
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert parameter.grad_fn is None
        assert (parameter == 3).all()
    gathered = [*dist.all_gather(layer.weight), *dist.gather(layer.weight)]
    gathered.append(dist.all_to_all(layer.weight))
    assert not any(part.requires_grad for part in gathered)
    transposed = nn.Parameter(torch.ones(2, 3).t())
    dist.all_reduce(transposed)
    assert (transposed == 2).all()


@distributed_test(world_size=3)
def test_a_nan_on_any_rank_survives_on_every_rank():
    for op, place in product(("min", "max"), range(3)):
        data = torch.tensor([float(dist.get_rank()), float("nan")])
        if dist.get_rank() != place:
            data[1] = 7.0
        dist.all_reduce(data, op)
        assert data.isnan().tolist() == [False, True]
        assert data[0] == (0 if op == "min" else 2)


@distributed_test(world_size=2)
def test_every_dtype_and_layout_is_moved_bit_by_bit():
    rank, size = dist.get_dist_info()
    for dtype in MOVED:
        data = in_layout(values(rank, dtype), "strided")
        rows = [values(r, dtype) for r in range(size)]
        assert list(map(bits, dist.all_gather(data))) == list(map(bits, rows)), dtype
        targets = [in_layout(torch.zeros_like(row), "column-major") for row in rows]
        assert dist.all_gather(targets, data) is None
        assert list(map(bits, targets)) == list(map(bits, rows))
        parts = dist.gather(data, 1)
        assert list(map(bits, parts)) == (list(map(bits, rows)) if rank == 1 else [])
        copied = data.clone()
        assert dist.broadcast(copied, 1) is None
        assert bits(copied) == bits(rows[1])
        target = in_layout(torch.zeros_like(data), "strided")
        assert dist.scatter(target, rows if rank == 1 else None, 1) is None
        assert bits(target) == bits(rows[rank])
        assert bits(data) == bits(rows[rank])
        joined = dist.all_to_all(rows[rank].t()[: 2 * (4 // 2)].contiguous())
        blocks = [row.t().contiguous().view(torch.uint8).chunk(2)[rank] for row in rows]
        assert bits(joined) == torch.cat(blocks).tolist()
        sent = [values(10 * rank + r, dtype, (r + 1, 2)) for r in range(size)]
        received = [
            in_layout(torch.zeros(rank + 1, 2).to(dtype), "column-major") for _ in range(size)
        ]
        assert dist.all_to_all(sent, received) is None
        expected = [values(10 * r + rank, dtype, (rank + 1, 2)) for r in range(size)]
        assert list(map(bits, received)) == list(map(bits, expected))


def flat_parts(rank, size, dtype, most):
    """What a rank sends to each other: as many elements as no other pair has, of `most`."""
    return [values(10 * rank + to, dtype, ((2 * rank + to) % (most + 1),)) for to in range(size)]


def exchange_flat_parts(group=None):
    """Parts of every dtype, some or all of them empty, two exchanges under way at once."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for dtype in MOVED:
        works, expected = [], []
        for most in (3, 0):
            sent = [flat_parts(r, size, dtype, most) for r in range(size)]
            counts = [len(part) for part in sent[rank]]
            from_each = [len(parts[rank]) for parts in sent]
            data = torch.cat(sent[rank])
            for whole in (data, in_layout(data, "strided")):
                works.append(all_to_all_flat(whole, counts, from_each, group))
                expected.append(torch.cat([parts[rank] for parts in sent]))
        for work, joined in zip(reversed(works), reversed(expected), strict=True):
            result = work.wait()
            assert result.dtype == dtype
            assert bits(result) == bits(joined), dtype
            assert result.is_contiguous()


def test_flat_parts_of_every_dtype_and_length_in_one_process():
    exchange_flat_parts()


@distributed_test(world_size=3)
def test_flat_parts_of_every_dtype_and_length():
    exchange_flat_parts()
    pair = c10d.new_group([1, 2])
    if dist.get_rank():
        exchange_flat_parts(pair)


def bad_flat_parts():
    size = dist.get_world_size()
    one, data = [1] * size, torch.ones(size)
    for arguments in (
        (torch.ones(size, 1), one, one),  # not flat
        (data, [*one, 0], one),  # a count too many
        (data, one, one[1:]),  # and too few
        (data, [0] * size, one),  # less than the tensor
        (data, [-1, size + 1][:size], one),
        (data, one, [-1, *one[1:]]),
        *([(data, one, [2])] if size == 1 else []),  # another number than is sent
    ):
        with pytest.raises(InvalidArgumentError, match=f"each of {size} ranks, got shape"):
            all_to_all_flat(*arguments)
    with pytest.raises(InvalidArgumentError, match="needs a tensor for data, got list"):
        all_to_all_flat(one, one, one)


@pytest.mark.parametrize("size", [0, 2])
def test_flat_parts_that_do_not_fit(size):
    run_ranks(bad_flat_parts, size) if size else bad_flat_parts()


@distributed_test(world_size=2)
def test_flat_parts_that_another_expects_otherwise_are_compared():
    rank = dist.get_rank()
    dist.check_collectives(True)
    try:
        with pytest.raises(MismatchError, match="rank 0 sends 8 bytes to rank 1, which expects 4"):
            all_to_all_flat(torch.ones(3), [1, 2] if rank == 0 else [2, 1], [1, 1])
        unlike = torch.ones(2, dtype=(torch.float32, torch.float64)[rank])
        with pytest.raises(MismatchError, match=r"rank 1: all_to_all_flat\(torch.float64"):
            all_to_all_flat(unlike, [1, 1], [1, 1])
    finally:
        dist.check_collectives(None)


@distributed_test(world_size=2)
def test_the_arguments_of_both_forms_have_names():
    rank, size = dist.get_dist_info()
    assert [int(x) for x in dist.all_gather(data=torch.tensor(rank))] == [0, 1]
    targets = [torch.zeros(1) for _ in range(size)]
    assert dist.all_gather(tensor_list=targets, tensor=torch.full((1,), 5.0)) is None
    assert [int(target) for target in targets] == [5, 5]
    assert dist.all_to_all(data=torch.arange(size)).tolist() == [rank] * size
    sent = [torch.full((1,), float(r)) for r in range(size)]
    assert dist.all_to_all(recv_list=targets, send_list=sent, group=None) is None
    assert [int(target) for target in targets] == [rank] * size


@distributed_test(world_size=3)
def test_roots_are_global_ranks_in_groups_and_means_are_theirs():
    rank = dist.get_rank()
    pair = c10d.new_group([1, 2])
    if rank == 0:
        return
    data = torch.tensor([-9 if rank == 1 else 2**62 + 1])
    dist.all_reduce(data, ReduceOp.AVG, pair)
    assert data.item() == (2**62 + 1 - 9) // 2
    data = torch.tensor([rank])
    dist.broadcast(data, 2, pair)
    assert data.item() == 2
    data = torch.tensor([rank])
    assert [int(p) for p in dist.gather(data, 2, pair)] == ([1, 2] if rank == 2 else [])
    dist.reduce(data, 1, "sum", pair)
    assert data.item() == (3 if rank == 1 else 2)
    dist.scatter(data, [torch.tensor([5]), torch.tensor([6])] if rank == 2 else None, 2, pair)
    assert data.item() == 4 + rank
    output = torch.zeros(2)
    dist.reduce_scatter(output, [torch.full((2,), float(rank))] * 2, "max", pair)
    assert output.tolist() == [2, 2]
    swapped = dist.all_to_all(torch.tensor([rank, 10 * rank]), pair)
    assert swapped.tolist() == ([1, 2] if rank == 1 else [10, 20])


def outside(call):
    with pytest.raises(NotInGroupError) as caught:
        call()
    return str(caught.value)


@distributed_test(world_size=3)
def test_a_root_outside_the_group_is_an_error_on_every_member():
    pair = c10d.new_group([1, 2])
    data = torch.ones(2)
    if dist.get_rank() == 0:
        for call in (dist.all_reduce, dist.all_gather, dist.all_to_all, dist.broadcast):
            assert "not a member" in outside(lambda call=call: call(data, group=pair))
        assert "not a member" in outside(lambda: all_to_all_flat(data, [1, 1], [1, 1], pair))
        return
    for text in (
        outside(lambda: dist.broadcast(data, group=pair)),
        outside(lambda: dist.gather(data, group=pair)),
        outside(lambda: dist.reduce(data, group=pair)),
        outside(lambda: dist.scatter(data, [data, data], group=pair)),
        outside(lambda: dist.broadcast(data, 3, pair)),
        outside(lambda: dist.broadcast(data, -1)),
    ):
        assert "ranks are" in text
    assert "1, 2" in outside(lambda: dist.broadcast(data, group=pair))


def test_a_root_outside_is_an_error_on_one_process_too():
    for call in (dist.broadcast, dist.gather, dist.reduce):
        assert "ranks are 0" in outside(lambda call=call: call(torch.ones(1), 1))
    with pytest.raises(InvalidArgumentError, match="global rank, got '0'"):
        dist.broadcast(torch.ones(1), "0")


def every_async():
    """Each call with async_op=True: the handle's wait returns what the synchronous call does."""
    rank, size = dist.get_dist_info()
    own, zeros = torch.tensor([rank], dtype=torch.int16), torch.zeros(size, 1, dtype=torch.int16)
    entries = [torch.tensor([r], dtype=torch.int16) for r in range(size)]
    strided = torch.full((2, 2), float(rank)).t()[:, :1]
    for data, call in (
        (strided, lambda x, **on: dist.all_reduce(x, "mean", **on)),
        (torch.tensor([True]), lambda x, **on: dist.all_reduce(x, **on)),
        (torch.tensor(rank), lambda x, **on: dist.all_gather(x, **on)),
        (zeros, lambda x, **on: dist.all_gather(list(x), own, **on)),
        (torch.tensor(rank), lambda x, **on: dist.gather(x, **on)),
        (torch.tensor([[rank, 5]]).t(), lambda x, **on: dist.broadcast(x, size - 1, **on)),
        (own, lambda x, **on: dist.scatter(x, entries, **on)),
        (own, lambda x, **on: dist.reduce(x, 0, **on)),
        (own, lambda x, **on: dist.reduce_scatter(x, entries, "mean", **on)),
        (torch.arange(size), lambda x, **on: dist.all_to_all(x, **on)),
        (zeros, lambda x, **on: dist.all_to_all(entries, list(x), **on)),
    ):
        expected, found = data.clone(), data.clone()
        result, work = call(expected), call(found, async_op=True)
        for waited in (work.wait(), work.wait()):
            assert type(waited) is type(result)
            assert result is None or all(map(torch.equal, waited, result))
        assert work.is_completed()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("size", [0, 1, 2])
def test_async_calls_complete_everything_on_wait(size):
    run_ranks(every_async, size) if size else every_async()


BAD_CALLS = {
    "unknown reduce operation": lambda one: dist.all_reduce(one, "total"),
    "needs a tensor for data, got list": lambda one: dist.all_reduce([1.0]),
    "got a torch.sparse_coo one": lambda one: dist.all_reduce(one.to_sparse()),
    "got a meta one": lambda one: dist.gather(one.to("meta")),
    "entries share memory": lambda one: dist.all_reduce(one.expand(3)),
    "fills output in place, but its entries share memory": lambda one: dist.reduce_scatter(
        one.expand(3), for_each(torch.ones(3))
    ),
    "for input_list, one per rank": lambda one: dist.reduce_scatter(one, []),
    "for recv_list, one per rank": lambda one: dist.all_to_all(for_each(one), one),
    "for tensor_list, one per rank, got 7": lambda one: dist.all_gather([one] * 7, one),
    "needs shape": lambda one: dist.all_gather(for_each(torch.ones(2)), one),
    "needs torch.float32": lambda one: dist.all_gather(for_each(one.int()), one),
    "all_gather needs a tensor, or a list to fill and a tensor, got float": lambda one: (
        dist.all_gather(1.0)
    ),
    "fill and a tensor, got list": lambda one: dist.all_gather([one]),
    "receive into, got list": lambda one: dist.all_to_all([one]),
    "or None for the default one, got Tensor": lambda one: dist.all_gather(one, one),
    "without dims": lambda one: dist.all_to_all(one[0]),
}


def for_each(tensor):
    return [tensor] * dist.get_world_size()


def make_bad_calls():
    for text, call in BAD_CALLS.items():
        with pytest.raises(InvalidArgumentError, match=text):
            call(torch.ones(1))


@pytest.mark.parametrize("size", [0, 2])
def test_bad_arguments_are_errors_with_and_without_a_group(size):
    run_ranks(make_bad_calls, size) if size else make_bad_calls()


@distributed_test(world_size=2)
def test_an_uneven_all_to_all_is_an_error_on_every_rank_and_harms_nothing():
    rank = dist.get_rank()
    for lengths in ((3, 3), (3, 4), (4, 3), (1, 0)):
        with pytest.raises(InvalidArgumentError) as caught:
            dist.all_to_all(torch.zeros(lengths[rank], 2))
        assert f"rank 0: {lengths[0]}, rank 1: {lengths[1]}" in str(caught.value)
    with pytest.raises(MismatchError, match="rank 0: 4, rank 1: 2"):
        dist.all_to_all(torch.zeros((4, 2)[rank]))
    with pytest.raises(MismatchError, match="4, 8 bytes"):
        dist.all_to_all(torch.zeros(4, dtype=(torch.float32, torch.float64)[rank]))
    assert dist.all_to_all(torch.tensor([rank, rank])).tolist() == [0, 1]


@distributed_test(world_size=2)
def test_a_bad_scatter_list_is_an_error_on_every_rank():
    data = torch.zeros(2)
    for bad in (None, [], [data], [data, torch.zeros(3)], [data, torch.zeros(2).int()]):
        with pytest.raises(InvalidArgumentError, match="scatter"):
            dist.scatter(data, bad if dist.get_rank() == 0 else None)
    dist.scatter(data, [torch.ones(2), torch.ones(2)])
    assert data.tolist() == [1, 1]


@distributed_test(world_size=2)
def test_reduce_scatter_by_the_backends_own_call():
    """The way of backends other than gloo, here on gloo's own call."""
    rank, info = dist.get_rank(), info_of(c10d.group.WORLD)
    info.ways.clear()
    info.routes["cpu"] = Route("other", frozenset(), True)
    try:
        for op, expected in (("sum", 3), ("mean", 1), ("max", 2)):
            output = torch.zeros(1, dtype=torch.int32)
            entries = [torch.tensor([r + rank], dtype=torch.int32) for r in (1, 1)]
            dist.reduce_scatter(output, entries, op)
            assert output.item() == expected
        x = torch.arange(8.0).view(2, 4) + rank
        piece = functional.reduce_scatter(x, 1)
        assert torch.equal(piece, (2 * torch.arange(8.0).view(2, 4) + 1).chunk(2, 1)[rank])
    finally:
        info.routes.clear()
        info.ways.clear()


def test_tensors_that_lie_in_one_memory_are_joined_without_a_copy():
    whole = torch.arange(10.0)
    pieces = list(whole[1:9].split([3, 0, 5]))
    joined = as_one(pieces)
    assert joined.data_ptr() == whole[1:].data_ptr()
    assert joined.tolist() == whole[1:9].tolist()
    for others in (
        pieces[::-1],  # in another order
        [whole[:3], whole[4:6]],  # with a hole
        [whole[:3], whole[2:5]],  # with an overlap
        [torch.ones(2), torch.zeros(2)],  # of two memories, wherever they lie
        [whole[:0], torch.ones(2)],
        [whole[:0], whole[:0]],
    ):
        assert as_one(others).tolist() == torch.cat(others).tolist()


@distributed_test(world_size=3)
def test_chunks_of_one_tensor_and_lists_of_several_dtypes():
    rank = dist.get_rank()
    whole = torch.arange(12.0, requires_grad=True) * (rank + 1)
    before = whole.detach().clone()
    entries, own = list(whole.chunk(3)), range(4 * rank, 4 * rank + 4)
    output = entries[rank].detach().clone()
    dist.reduce_scatter(output, entries)
    assert output.tolist() == [6.0 * x for x in own]
    received = list(torch.zeros(12).chunk(3))
    dist.all_to_all(entries, received)
    assert [x.tolist() for x in received] == [[x * (r + 1.0) for x in own] for r in range(3)]
    assert torch.equal(whole, before)
    mixed = [torch.tensor([rank], dtype=torch.uint8), torch.ones(3), torch.ones(1).double()]
    shapes = [mixed[rank].clone().zero_() for _ in range(3)]
    dist.all_to_all(mixed, shapes)  # slices that begin where their dtype may not
    assert [x.dtype for x in shapes] == [mixed[rank].dtype] * 3

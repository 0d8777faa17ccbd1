"""What experts take of rows and stacks: the bits of a plain call, and gradients written once."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from scaletorch.dist.testing import relative_error
from scaletorch.parallel.expert_parallel.computing.taking import call_taking

EXPERTS, HIDDEN, INNER, ROWS = 5, 6, 7, 12


def _loop(up, down, rows, index, weights):
    """Experts one after another, as models have them; the last one gets no rows."""
    total = torch.zeros_like(rows)
    for expert in index.unique():
        row, slot = torch.where(index == expert)
        inner = F.silu(F.linear(rows[row], up[expert]))
        found = F.linear(inner, down[int(expert)]) * weights[row, slot, None]
        total.index_add_(0, row, found.to(total.dtype))
    return total


def _otherwise(up, down, rows, index, weights):
    """Every other way to take something: negative, repeated, sliced, by lists, and whole."""
    some = torch.tensor([-1, 2, 2, 0])
    total = rows * weights + rows[some].sum(0) + rows[1:3].sum(0) + rows[[3, 4]].sum(0) + rows[5]
    total = total + rows[index[:, 0] == 1].sum(0) + rows[None, some].sum((0, 1))
    total = total + (rows[some] @ up[-1].mT @ down[4].mT).sum(0) + up[torch.tensor([0, 0])].sum()
    return total + up[1, 0].sum() + down[2:].sum() + up.sum() + sum(each.sum() for each in down)


def _matmuls(up, down, rows, index, weights):
    """Weights the other way round, one product twice, a bias and a result that is written to."""
    total = rows * 0
    for expert in index.unique():
        row, slot = torch.where(index == expert)
        mine = rows[row]
        mine *= 2
        inner = torch.tanh(F.linear(F.linear(mine, up[expert]), down[expert]))
        inner = inner + F.linear(F.linear(3 * mine, up[expert]), down[expert])
        scale = weights[row, slot].unsqueeze(1)
        scale.mul_(3)
        back = inner @ down[expert] @ up[expert] + rows[row] * scale
        total = total.index_add(0, row, back * weights[row, slot, None])
    return total


def _sorting(up, down, rows, index, weights):
    """All rows at once, sorted by expert, and those of a token added up."""
    top_k = index.shape[1]
    numbers, order = torch.sort(index.reshape(-1))
    mine = rows[order // top_k]
    mine *= 2
    inner = F.silu((up[numbers] @ mine[..., None])[..., 0])
    found = (down[numbers] @ inner[..., None])[..., 0] * weights.reshape(-1)[order].unsqueeze(1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    total = found[back].view(len(rows), top_k, -1).sum(dim=1) + rows
    return total + torch.sum(rows, 0) + rows.sum(dim=1, keepdim=True) + torch.sum(input=rows, dim=0)


WAYS = {"a loop": _loop, "otherwise": _otherwise, "products": _matmuls, "sorting": _sorting}
SIZES = (3, 0, 5, 4, 0)  # rows of each expert


def _run(way, dtype, taking, backwards=1, sizes=()):
    torch.manual_seed(0)
    leaves = [
        torch.randn(shape).to(dtype).requires_grad_()
        for shape in ((EXPERTS, INNER, HIDDEN), (EXPERTS, HIDDEN, INNER), (ROWS, HIDDEN), (ROWS, 1))
    ]
    up, down, rows, weights = leaves
    index = torch.randint(EXPERTS - 1, (ROWS, 1))
    if sizes:
        index = torch.arange(EXPERTS).repeat_interleave(torch.tensor(sizes))[:, None]
    given = index, weights

    def experts(rows, index, weights):
        return WAYS[way](up, down, rows, index, weights)

    out = experts(rows, *given)
    if taking:
        out = call_taking(experts, rows, given, (up, down), sizes if taking == "sorted" else ())
    gradient = torch.randn(ROWS, HIDDEN).to(dtype)
    for number in range(backwards):
        out.backward(gradient, retain_graph=number + 1 < backwards)
    return [out.detach(), *(each.grad for each in leaves)]


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_loop_over_experts_has_the_same_bits(dtype, backwards):
    expected = _run("a loop", dtype, False, backwards)
    assert all(map(torch.equal, _run("a loop", dtype, True, backwards), expected))


@pytest.mark.parametrize("sizes", [(), SIZES])
def test_what_sorts_its_rows_has_the_same_values(sizes):
    found, expected = (_run("sorting", torch.float64, way, 2, sizes) for way in ("sorted", False))
    assert max(map(relative_error, found, expected)) <= 1e-14


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_that_lie_by_expert_are_taken_in_pieces(dtype, backwards):
    expected = _run("a loop", dtype, False, backwards, SIZES)
    assert all(map(torch.equal, _run("a loop", dtype, "sorted", backwards, SIZES), expected))


def test_rows_of_every_expert_are_a_piece():
    numbers = torch.arange(EXPERTS).repeat_interleave(torch.tensor(SIZES))[:, None]
    rows, weights = torch.randn(ROWS, 3, requires_grad=True), torch.rand(ROWS, 1)

    def each(rows, numbers, weights):
        return [rows[torch.where(numbers[:, 0] == e)[0]] for e in range(EXPERTS) if SIZES[e]]

    found = call_taking(each, rows, (numbers, weights), (), SIZES)
    assert {piece.grad_fn.name() for piece in found} == {"CloneBackward0"}


@pytest.mark.parametrize("way", ["products", "otherwise", "sorting"])
def test_pieces_may_be_written_to_and_parts_used_again(way):
    expected = _run(way, torch.float64, False, 2, SIZES)
    found = _run(way, torch.float64, "sorted", 2, SIZES)
    assert max(map(relative_error, found, expected)) <= 1e-14


def test_sorted_rows_that_are_sorted_again_stay_as_they_are():
    order = torch.tensor([0, 1, 0, 1]).repeat(16)  # long enough to be sorted in another order
    rows, ways = torch.randn(64, 3, requires_grad=True), []

    def experts(rows, numbers, _):
        index = torch.sort(numbers.reshape(-1))[1]
        ways.append(rows[index].grad_fn.name())
        ways.append(rows.view(64, 1, 3).sum(dim=1).grad_fn.name())
        return rows[index]

    for numbers in (order.sort()[0], order):
        found = call_taking(experts, rows, (numbers[:, None], torch.ones(64, 1)), (), (32, 32))
        assert torch.equal(found, rows[numbers.sort(stable=True)[1]])
    assert ways[:2] == ["CloneBackward0"] * 2
    assert ways[2] != "CloneBackward0"


def test_rows_in_another_order_or_of_two_experts_are_no_piece():
    rows, weights = torch.randn(ROWS, 3, requires_grad=True), torch.rand(ROWS, 1)
    numbers = torch.arange(EXPERTS).repeat_interleave(torch.tensor(SIZES))[:, None]
    for index in ([2, 1, 0], [0, 1], [1, 2, 3], [0, 1, 2, 3], [0, 1, 1], [-12, -11, -10], []):
        index = torch.tensor(index, dtype=torch.int64)
        wanted = rows[index].clone(), weights[index, index * 0, None]

        def take(rows, weights, index=index):
            return rows[index], weights[index, index * 0, None]

        found = call_taking(lambda rows, _, w: take(rows, w), rows, (numbers, weights), (), SIZES)
        assert all(map(torch.equal, found, wanted))

    def outside(rows, _, weights):
        return weights[torch.arange(3), torch.ones(3).long()]

    with pytest.raises(IndexError, match="out of bounds"):
        call_taking(outside, rows, (numbers, weights), (), SIZES)


def test_a_second_backward_leaves_alone_what_the_first_one_returned():
    up, rows = torch.randn(EXPERTS, 2, 3, requires_grad=True), torch.randn(ROWS, 3)
    out = call_taking(lambda rows: F.linear(rows, up[1]).sum(), rows, (), (up,))
    first, second = (torch.autograd.grad(k * out, up, retain_graph=True)[0] for k in (1, 2))
    assert torch.equal(2 * first, second)
    assert first.any()


def test_whatever_else_is_taken_has_its_gradient():
    found, expected = (_run("otherwise", torch.float64, taking) for taking in (True, False))
    assert max(map(relative_error, found, expected)) <= 1e-14


def test_products_are_those_of_autocast():
    up, rows = torch.randn(EXPERTS, 2, 3, requires_grad=True), torch.randn(ROWS, 3)

    def experts(rows):
        return F.linear(rows[torch.tensor([0, 1])], up[1])

    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = call_taking(experts, rows, (), (up,)), experts(rows)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wanted)
    (found - 2 * wanted).float().sum().backward()
    assert torch.equal(up.grad[1], -torch.ones(2, 1) @ rows[:2].bfloat16().sum(0, True).float())


@pytest.mark.parametrize(("place", "index"), [("rows", ROWS), ("rows", -ROWS - 1), ("up", EXPERTS)])
def test_what_is_not_there_is_refused(place, index):
    up, rows = torch.ones(EXPERTS, 2, 2, requires_grad=True), torch.ones(ROWS, 2)

    def experts(rows):
        return up[index] if place == "up" else rows[torch.tensor([0, index])]

    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        call_taking(experts, rows, (), (up,))


class _Written(TorchDispatchMode):
    """Notes operations, and the shapes of tensors that they return."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.found.append((func.__name__, getattr(found, "shape", None)))
        return found


@pytest.mark.parametrize("experts", [2, 8])
def test_gradients_of_stacks_are_written_once_and_those_of_rows_quickly(experts):
    stack, rows = (torch.ones(shape, requires_grad=True) for shape in ((experts, 3, 4), (2, 4)))

    def call(rows):
        index = torch.tensor([0])
        return sum(F.linear(rows[index], stack[expert]).sum() for expert in range(experts))

    counts, slow, copied = [], [], []
    for out in (call(rows), call_taking(call, rows, (), (stack,))):
        with _Written() as written:
            torch.autograd.grad(out, (stack, rows))
        counts.append(sum(shape == stack.shape for _, shape in written.found))
        copied.append(sum(name in ("stack.default", "cat.default") for name, _ in written.found))
        slow.append(sum("index_put" in name for name, _ in written.found))
    assert counts[0] >= 2 * experts - 1  # so many are added up
    assert counts[1] == 1  # made once, in which products write
    assert copied[1] == 0
    assert slow == [experts, 0]

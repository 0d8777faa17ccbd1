"""What experts take of rows and stacks: the bits of a plain call, and gradients written once."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from scaletorch.dist.testing import relative_error
from scaletorch.parallel.expert_parallel.taking import call_taking

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


WAYS = {"a loop": _loop, "otherwise": _otherwise}


def _run(way, dtype, taking, backwards=1):
    torch.manual_seed(0)
    leaves = [
        torch.randn(shape).to(dtype).requires_grad_()
        for shape in ((EXPERTS, INNER, HIDDEN), (EXPERTS, HIDDEN, INNER), (ROWS, HIDDEN), (ROWS, 1))
    ]
    up, down, rows, weights = leaves
    given = torch.randint(EXPERTS - 1, (ROWS, 1)), weights

    def experts(rows, index, weights):
        return WAYS[way](up, down, rows, index, weights)

    out = call_taking(experts, rows, given, (up, down)) if taking else experts(rows, *given)
    gradient = torch.randn(ROWS, HIDDEN).to(dtype)
    for number in range(backwards):
        out.backward(gradient, retain_graph=number + 1 < backwards)
    return [out.detach(), *(each.grad for each in leaves)]


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_loop_over_experts_has_the_same_bits(dtype, backwards):
    expected = _run("a loop", dtype, False, backwards)
    assert all(map(torch.equal, _run("a loop", dtype, True, backwards), expected))


def test_whatever_else_is_taken_has_its_gradient():
    found, expected = (_run("otherwise", torch.float64, taking) for taking in (True, False))
    assert max(map(relative_error, found, expected)) <= 1e-14


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
        return sum((rows[index] @ stack[expert].mT).sum() for expert in range(experts))

    counts, slow = [], []
    for out in (call(rows), call_taking(call, rows, (), (stack,))):
        with _Written() as written:
            torch.autograd.grad(out, (stack, rows))
        counts.append(sum(shape == stack.shape for _, shape in written.found))
        slow.append(sum("index_put" in name for name, _ in written.found))
    assert counts[0] >= 2 * experts - 1  # so many are added up
    assert counts[1] == 1
    assert slow == [experts, 0]

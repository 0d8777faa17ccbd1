"""Tokens to their experts' ranks and back, beside one process that has all experts."""

from itertools import product

import pytest
import torch
import torch.distributed as c10d
from torch.utils.checkpoint import checkpoint

from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.testing import relative_error, run_ranks, worst
from scaletorch.parallel.expert_parallel import combine, dispatch

HIDDEN, EXPERTS, TOP_K = 6, 5, 3
WORLD = c10d.group.WORLD

# Tokens of each rank, and what experts they choose.
ROUTINGS = {
    "drawn": (4, 7, 3),
    "one expert gets all": (4, 7, 3),
    "a rank without tokens": (4, 0, 3),
    "a rank without rows": (4, 2, 3),
    "nobody has tokens": (0, 0, 0),
}


def _whole(routing, ranks, dtype=torch.float64):
    """Return the global batch: hidden, indices, weights, experts' matrices, and a target."""
    torch.manual_seed(3)
    sizes = ROUTINGS[routing][:ranks]
    tokens = sum(sizes)
    index = torch.rand(tokens, EXPERTS).argsort(1)[:, :TOP_K]
    if routing == "one expert gets all":
        index = torch.full((tokens, 1), 1)
    if routing == "a rank without rows":
        index = index % 2  # the same expert several times, too
    weights = torch.rand(tokens, index.shape[1], dtype=dtype)
    hidden, target = torch.randn(2, tokens, HIDDEN, dtype=dtype)
    return sizes, hidden, index, weights, torch.randn(EXPERTS, HIDDEN, HIDDEN, dtype=dtype), target


def _experts(hidden, index, weights, matrices):
    """Sum the weighted experts; an index that is outside counts for nothing."""
    total = torch.zeros_like(hidden)
    for expert, matrix in enumerate(matrices):
        chosen = ((index == expert) * weights).sum(1, keepdim=True)
        total = total + torch.tanh(hidden @ matrix) * chosen
    return total


def _expected(routing, ranks):
    _, hidden, index, weights, matrices, target = _whole(routing, ranks)
    leaves = [each.requires_grad_() for each in (hidden, weights, matrices)]
    out = _experts(hidden, index, weights, matrices)
    (out * target).sum().backward()
    return out.detach(), [each.grad for each in leaves]


def _over_ranks(routing, counts, recompute=False, frozen=()):
    ranks, rank = c10d.get_world_size(), c10d.get_rank()
    sizes, hidden, index, weights, matrices, target = _whole(routing, ranks)
    first = sum(counts[:rank])
    mine = [each.split(sizes)[rank].clone() for each in (hidden, weights)]
    mine.append(matrices[first : first + counts[rank]].clone())
    for number, leaf in enumerate(mine):
        leaf.requires_grad_(number not in frozen)
    own_index, own_target = index.split(sizes)[rank], target.split(sizes)[rank]

    def block(hidden, weights, matrices):
        came = dispatch(hidden, own_index, weights, counts, WORLD)
        assert came.hidden.is_contiguous()
        assert int(came.top_k_index.max()) <= counts[rank] if len(came.hidden) else True
        return combine(_experts(*came[:3], matrices), came.route)

    out = checkpoint(block, *mine, use_reentrant=False) if recompute else block(*mine)
    (out * own_target).sum().backward()
    return out.detach(), [each.grad for each in mine]


def _all_over_ranks(cases):
    return [_over_ranks(*case) for case in cases]


@pytest.mark.parametrize("every", [[(2, 3)], [(2, 2, 1), (1, 1, 3)]])
def test_results_and_gradients_are_one_process(every):
    cases, ranks = [*product(ROUTINGS, every, (False, True))], len(every[0])
    by_case = zip(*run_ranks(_all_over_ranks, ranks, cases), strict=True)
    for case, found in zip(cases, by_case, strict=True):
        out, gradients = _expected(case[0], ranks)
        differences = [relative_error(torch.cat([rank[0] for rank in found]), out)]
        for number, expected in enumerate(gradients):
            pieces = [rank[1][number] for rank in found]
            differences.append(relative_error(torch.cat(pieces), expected))
        assert worst(differences) <= 1e-12, case


FROZEN = [(0,), (1,), (0, 1), (2,)]


def test_what_needs_no_gradient_gets_none_and_nothing_waits():
    cases = [("a rank without rows", (2, 2, 1), False, frozen) for frozen in FROZEN]
    _, gradients = _expected("a rank without rows", 3)
    by_case = zip(*run_ranks(_all_over_ranks, 3, cases), strict=True)
    for frozen, found in zip(FROZEN, by_case, strict=True):
        for number, expected in enumerate(gradients):
            pieces = [rank[1][number] for rank in found]
            if number in frozen:
                assert pieces == [None] * 3
            else:
                assert relative_error(torch.cat(pieces), expected) <= 1e-12


def _first_alone(*given):
    return _over_ranks(*given, frozen=(0, 1) if c10d.get_rank() else ())


def test_a_rank_that_alone_needs_gradients_has_them():
    found = run_ranks(_first_alone, 3, "drawn", (2, 2, 1))
    _, gradients = _expected("drawn", 3)
    for number, expected in enumerate(gradients[:2]):
        assert relative_error(found[0][1][number], expected[: ROUTINGS["drawn"][0]]) <= 1e-12
        assert [rank[1][number] for rank in found[1:]] == [None, None]


def _drawn(dtype=torch.float64):
    hidden, weights = torch.randn(3, HIDDEN, dtype=dtype), torch.rand(3, 2, dtype=dtype)
    return hidden.requires_grad_(), torch.tensor([[0, 1], [3, 2], [1, 3]]), weights


def test_gradients_of_gradients_are_refused():
    hidden, index, weights = _drawn()
    rows = dispatch(hidden, index, weights, 4)
    out = combine(rows.hidden * rows.top_k_weights.sum(1, keepdim=True), rows.route)
    (gradient,) = torch.autograd.grad(out.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="trying to differentiate twice"):
        gradient.square().sum().backward()


def test_experts_are_no_more_than_weights_can_number():
    assert len(dispatch(*_drawn(torch.bfloat16), 2**15 - 1).hidden) == 3
    with pytest.raises(InvalidArgumentError, match=r"got 32768 experts.* torch\.bfloat16 is"):
        dispatch(*_drawn(torch.bfloat16), 2**15)

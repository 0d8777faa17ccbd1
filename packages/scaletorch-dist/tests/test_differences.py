"""A comparison fails on what is not a number, on shapes that differ, and on nothing."""

import math

import pytest
import torch

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import relative_error, run_ranks, worst

NAN = float("nan")


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf, -1.0])
def test_the_worst_error_is_infinite_wherever_one_is_no_error(place, bad):
    errors = [1e-16, 2e-16, 3e-16]
    assert worst(errors) == 3e-16
    errors[place] = bad
    assert worst(errors) == math.inf
    assert worst(map(torch.tensor, errors)) == math.inf
    assert worst([worst(errors), 1e-16]) == math.inf


def test_the_worst_of_nothing_is_refused():
    with pytest.raises(InvalidArgumentError, match="nothing was compared"):
        worst([])


def one_rank_has_a_nan(rank_with_nan):
    rank = torch.distributed.get_rank()
    return relative_error(torch.tensor(NAN if rank == rank_with_nan else 1.0), torch.ones(()))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_nan_of_any_rank_decides(rank):
    assert worst(run_ranks(one_rank_has_a_nan, 2, rank)) == math.inf


def test_an_error_is_relative_to_the_largest_expected_value():
    expected = torch.tensor([1.0, -4.0], dtype=torch.float64)
    assert relative_error(expected + 1e-3, expected) == pytest.approx(2.5e-4)
    assert relative_error(expected + 1e-3, expected, scale=10 * expected) == pytest.approx(2.5e-5)
    assert relative_error(expected.float(), expected) == 0
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0
    assert relative_error(torch.full((3,), 1e-30), torch.zeros(3)) == math.inf
    assert relative_error(torch.zeros(0, 3), torch.zeros(0, 3)) == 0


@pytest.mark.parametrize("bad", [NAN, math.inf])
@pytest.mark.parametrize("places", [(0,), (1,), (0, 1), (2,)])
def test_what_is_not_finite_is_infinitely_far_off(places, bad):
    tensors = [torch.ones(4), torch.ones(4), torch.ones(4)]
    for place in places:
        tensors[place][1] = bad
    assert relative_error(tensors[0], tensors[1], scale=tensors[2]) == math.inf


def test_shapes_must_agree():
    message = r"expected a tensor of shape \(2, 3\), got \(3,\)"
    with pytest.raises(InvalidArgumentError, match=message):
        relative_error(torch.ones(3), torch.ones(2, 3))

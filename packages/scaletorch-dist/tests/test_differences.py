"""A comparison fails on what is not a number, on shapes that differ, and on nothing."""

import math

import pytest
import torch

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import relative_error, worst

NAN = float("nan")


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf, -1.0])
def test_the_worst_error_is_infinite_wherever_one_is_no_error(bad):
    assert worst([1e-16, 3e-16, 2e-16]) == 3e-16
    for place in range(3):
        errors = [1e-16, 2e-16, 3e-16]
        errors[place] = bad
        assert worst(errors) == worst(map(torch.tensor, errors)) == math.inf
    with pytest.raises(InvalidArgumentError, match="nothing was compared"):
        worst([])


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

    message = r"expected a tensor of shape \(2, 3\), got \(3,\)"
    with pytest.raises(InvalidArgumentError, match=message):
        relative_error(torch.ones(3), torch.ones(2, 3))

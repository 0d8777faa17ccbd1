"""Layers spread over stages: by count, by costs and by parameters."""

import math
from fractions import Fraction
from itertools import combinations, pairwise

import one_process
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scaletorch.dist import InvalidArgumentError
from scaletorch.parallel.pipeline_parallel import Split, distribute_layers
from scaletorch.parallel.pipeline_parallel.splitting.split import place

COSTS = st.one_of(
    st.lists(st.integers(0, 9), min_size=3, max_size=11),
    st.lists(st.floats(0, 1e3, allow_nan=False), min_size=3, max_size=11),
)


def flat(ranges):
    return [index for own in ranges for index in own]


def totals(ranges, costs):
    exact = [Fraction(cost) for cost in costs]
    sums = [sum(exact[index + 1] for index in own) for own in ranges]
    sums[0] += exact[0]
    sums[-1] += exact[-1]
    return sums


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 200))
def test_all_layers_are_kept_in_order(num_layers, pp_size):
    num_layers = max(num_layers, pp_size)
    ranges = distribute_layers(num_layers, pp_size)
    assert flat(ranges) == list(range(num_layers))
    lengths = [*map(len, ranges)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@settings(deadline=None)
@given(COSTS, st.integers(1, 9))
def test_no_way_is_better(costs, pp_size):
    num_layers = len(costs) - 2
    pp_size = min(pp_size, num_layers)
    ranges = distribute_layers(num_layers, pp_size, costs)
    assert flat(ranges) == list(range(num_layers))
    assert len(ranges) == pp_size
    assert all(ranges)
    ways = [
        [range(*pair) for pair in pairwise((0, *cuts, num_layers))]
        for cuts in combinations(range(1, num_layers), pp_size - 1)
    ]

    def badness(way):
        sums = totals(way, costs)
        return max(sums), sum(total * total for total in sums), [-len(own) for own in way]

    assert ranges == min(ways, key=badness)


@pytest.mark.parametrize("costs", [None, [1] * 6])
@pytest.mark.parametrize("pp_size", [0, -1, 5])
def test_no_stages_or_too_many(pp_size, costs):
    with pytest.raises(InvalidArgumentError, match="from 1 to 4"):
        distribute_layers(4, pp_size, costs)


@pytest.mark.parametrize(
    ("costs", "text"),
    [
        ([1, 1], r"expected 4 costs: .* each of the 2 layers, .*; got 2\. Use 0 for none"),
        ([1, 1, -1, 1], r"finite numbers from 0, and costs\[2\] is -1"),
        ([1, math.nan, 1, 1], r"costs\[1\] is nan"),
        ([1, 1, 1, math.inf], r"costs\[3\] is inf"),
        (["1", 1, 1, 1], r"costs\[0\] is '1'"),
    ],
)
def test_costs_that_do_not_fit(costs, text):
    with pytest.raises(InvalidArgumentError, match=text):
        distribute_layers(2, 2, costs)


class Net(one_process.Net):
    num_layers, vocabulary = 6, 16

    def __init__(self, tied=False):
        super().__init__(tied=tied)
        self.norm = nn.LayerNorm(4, bias=False)

    def layer(self):
        return nn.Linear(4, 4, bias=False)

    def forward(self, input_ids):
        return self.head(self.norm(self.run(self.embed(input_ids))))


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_as_costs(tied):
    """Sections have 64, six times 16, and 64 + 4 parameters; a tied head counts as any."""
    placement = place(Net(tied), Split(costs="parameters"), 3)
    assert placement.stages == (
        ("embed", "layers.0"),
        ("layers.1", "layers.2", "layers.3", "layers.4"),
        ("layers.5", "head", "norm"),
    )
    assert placement.split == Split("embed", "layers", ("head", "norm"), costs="parameters")


def test_parameters_of_two_names_in_one_section_count_once():
    model = Net(tied=True)
    model.layers[1].weight = model.layers[0].weight
    split = Split((), "layers", ("embed", "norm", "head"), costs="parameters")
    found = place(model, split, 2)  # 0, six times 16, and 64 + 4
    assert found.stages == (
        tuple(f"layers.{i}" for i in range(5)),
        ("layers.5", "embed", "norm", "head"),
    )


def test_numbers_as_costs():
    split = Split(costs=(0, 9, 1, 1, 1, 1, 1, 0))
    assert [len(names) for names in place(Net(), split, 2).stages] == [2, 7]
    with pytest.raises(InvalidArgumentError, match="expected 8 costs"):
        place(Net(), Split(costs=(1, 1)), 2)
    with pytest.raises(InvalidArgumentError, match=r"\(costs='time'\): costs must be None"):
        place(Net(), Split(costs="time"), 2)

"""Layers spread over stages: by count, by costs, by parameters and by measured times."""

import math
import re
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scaletorch.dist import InvalidArgumentError
from scaletorch.parallel.pipeline_parallel import Split, distribute_layers, measure_costs
from scaletorch.parallel.pipeline_parallel.splitting.split import place

COSTS = st.one_of(
    st.lists(st.integers(0, 9), min_size=3, max_size=11),
    st.lists(st.floats(0, 1e3, allow_nan=False), min_size=3, max_size=11),
)


def flat(ranges):
    return [index for part in ranges for index in part]


def totals(ranges, costs):
    exact = [Fraction(cost) for cost in costs]
    sums = [sum(exact[index + 1] for index in part) for part in ranges]
    sums[0] += exact[0]
    sums[-1] += exact[-1]
    return sums


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 200))
def test_all_layers_are_kept_in_order(num_layers, pp_size):
    if pp_size > num_layers:
        with pytest.raises(InvalidArgumentError, match=f"from 1 to {num_layers}$"):
            distribute_layers(num_layers, pp_size)
        return
    ranges = distribute_layers(num_layers, pp_size)
    assert flat(ranges) == list(range(num_layers))
    lengths = [len(part) for part in ranges]
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
        return max(sums), sum(total * total for total in sums), [-len(part) for part in way]

    assert ranges == min(ways, key=badness)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 60))
def test_equal_costs_are_a_count(num_layers, pp_size):
    pp_size = min(pp_size, num_layers)
    costs = [0, *[0.1] * num_layers, 0]
    assert distribute_layers(num_layers, pp_size, costs) == distribute_layers(num_layers, pp_size)


def test_eight_layers_on_three_stages():
    assert distribute_layers(8, 3) == [range(3), range(3, 6), range(6, 8)]
    assert distribute_layers(8, 3, [0, *[1] * 8, 4]) == [range(4), range(4, 7), range(7, 8)]
    assert distribute_layers(8, 3, [4, *[1] * 8, 0]) == [range(1), range(1, 5), range(5, 8)]


@pytest.mark.parametrize("costs", [None, [1] * 6])
@pytest.mark.parametrize("pp_size", [0, -1, 5])
def test_no_stages_or_too_many(pp_size, costs):
    with pytest.raises(InvalidArgumentError, match="from 1 to 4"):
        distribute_layers(4, pp_size, costs)


@pytest.mark.parametrize(
    ("costs", "text"),
    [
        ([1, 1], r"expected 4 costs: .* each of the 2 layers, .*; got 2\. Use 0 for nothing"),
        ([1, 1, -1, 1], r"finite numbers from 0, and costs\[2\] is -1"),
        ([1, math.nan, 1, 1], r"costs\[1\] is nan"),
        ([1, 1, 1, math.inf], r"costs\[3\] is inf"),
        (["1", 1, 1, 1], r"costs\[0\] is '1'"),
    ],
)
def test_costs_that_do_not_fit(costs, text):
    with pytest.raises(InvalidArgumentError, match=text):
        distribute_layers(2, 2, costs)


class Net(nn.Module):
    def __init__(self, tied=False, vocabulary=16):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(6))
        self.norm = nn.LayerNorm(4, bias=False)
        self.head = nn.Linear(4, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids, scale=1.0):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x) * scale
        return self.head(self.norm(x))


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_as_costs(tied):
    """The parts have 64, six times 16, and 4 + 64 parameters; a tied head counts as any."""
    placement = place(Net(tied), Split(costs="parameters"), 3)
    assert placement.stages == (
        ("embed", "layers.0"),
        ("layers.1", "layers.2", "layers.3", "layers.4"),
        ("layers.5", "norm", "head"),
    )
    assert placement.split == Split("embed", "layers", ("norm", "head"), costs="parameters")


def test_parameters_of_two_names_in_one_part_count_once():
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
    with pytest.raises(InvalidArgumentError, match=r"\(costs='time'\): expected None, numbers "):
        place(Net(), Split(costs="time"), 2)


class Clock:
    """Time that passes only where the test says so."""

    now = 0.0

    def __call__(self, device):
        return self.now


class Pass(torch.autograd.Function):
    """The identity that takes ``cost`` forward and ten times that backward."""

    @staticmethod
    def forward(ctx, x, clock, cost):
        ctx.clock, ctx.cost = clock, cost
        clock.now += cost
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += 10 * ctx.cost
        return gradient, None, None


class Slow(nn.Linear):
    def __init__(self, clock, cost):
        super().__init__(4, 4)
        self.clock, self.cost = clock, cost

    def forward(self, x):
        return Pass.apply(super().forward(x), self.clock, self.cost)


class SlowNet(Net):
    def __init__(self, clock):
        super().__init__(vocabulary=4)
        self.before, self.after = Slow(clock, 1.0), Slow(clock, 2.0)
        self.layers = nn.ModuleList(Slow(clock, cost) for cost in (4.0, 8.0, 16.0))
        self.dropout, self.count = nn.Dropout(0.5), nn.BatchNorm1d(4)
        self.order = [0, 1, 2]

    def forward(self, input_ids, scale=1.0):
        x = self.before(self.embed(input_ids))
        for index in self.order:
            x = self.layers[index](x) * scale
        return self.dropout(self.after(self.count(x.transpose(1, 2)).transpose(1, 2)))


SLOW = Split(("embed", "before"), "layers", ("dropout", "count", "after", "norm", "head"))


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("scaletorch.parallel.pipeline_parallel.preparation.measure._now", clock)
    return clock


def batch():
    return {"input_ids": torch.tensor([[0, 1]]), "labels": torch.tensor([[1, -100]]), "scale": 2.0}


def test_all_of_the_time_is_measured_and_nothing_changes(clock):
    model = SlowNet(clock)
    model(torch.tensor([[0, 1]])).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    values = {name: g.clone() for name, g in gradients.items() if g is not None}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert measure_costs(model, batch(), SLOW, repeats=2) == (11.0, 44.0, 88.0, 176.0, 22.0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is gradients[name] for name, p in model.named_parameters())
    assert all(torch.equal(gradients[name], value) for name, value in values.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_what_is_frozen_has_no_backward(clock):
    model = SlowNet(clock)
    for frozen in (model.embed, model.before, model.layers[0]):
        frozen.requires_grad_(False)
    assert measure_costs(model, batch(), SLOW) == (1.0, 4.0, 88.0, 176.0, 22.0)
    model.requires_grad_(False)
    with torch.no_grad():
        assert measure_costs(model, batch(), SLOW) == (1.0, 4.0, 8.0, 16.0, 2.0)


def test_a_loss_of_ones_own_counts_to_what_is_after_the_layers(clock):
    def loss(output, batch):
        return Pass.apply(output.sum() * batch["scale"], clock, 100.0)

    costs = measure_costs(SlowNet(clock), {**batch(), "labels": None}, SLOW, loss_fn=loss)
    assert costs == (11.0, 44.0, 88.0, 176.0, 1122.0)


def test_measured_costs_balance_a_model():
    model = Net()
    tokens = torch.randint(16, (2, 3))
    costs = measure_costs(model, {"input_ids": tokens}, repeats=1)
    assert len(costs) == 8
    assert min(costs) > 0
    assert len(place(model, Split(costs=costs), 3).stages) == 3


def test_models_that_cannot_be_measured(clock):
    model = SlowNet(clock)
    with pytest.raises(InvalidArgumentError, match="repeats must be 1 at least, got 0"):
        measure_costs(model, batch(), SLOW, repeats=0)
    for order in ([0, 1], [1, 0, 2], [0, 1, 1, 2]):
        model.order = order
        with pytest.raises(InvalidArgumentError, match=re.escape(f"it called {order}. A pipeline")):
            measure_costs(model, batch(), SLOW)
    with pytest.raises(
        InvalidArgumentError, match="parameters of it are on the meta device; build"
    ):
        measure_costs(model.to("meta"), batch(), SLOW)

"""Predicted times: closed formulas, a case worked out by hand, and costs that mean nothing."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletorch.dist import InvalidArgumentError
from scaletorch.parallel.pipeline_parallel import (
    SCHEDULES,
    Action,
    Costs,
    Schedule,
    afab,
    one_f_one_b,
    simulate,
)


@given(st.sampled_from([afab, one_f_one_b]), st.integers(1, 12), st.integers(1, 24))
@settings(deadline=None, max_examples=40)
def test_the_closed_formula(builder, p, m):
    timeline = simulate(builder(p, m), Costs(forward=3, backward=5))
    assert timeline.makespan == (m + p - 1) * 8
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))


def test_an_example_worked_out_by_hand():
    """Three ranks, two micro-batches; F 1, B 2, stage 1 twice as slow, and 10 for a message."""
    timeline = simulate(one_f_one_b(3, 2), Costs(1, 2, message=10, stages=(1, 2, 1)))
    assert [(s.rank, str(s.action), s.start, s.end) for s in timeline.spans] == [
        (0, "F0", 0, 1), (0, "F1", 1, 2), (0, "B0", 50, 52), (0, "B1", 54, 56),
        (1, "F0", 11, 13), (1, "F1", 13, 15), (1, "B0", 36, 40), (1, "B1", 40, 44),
        (2, "F0", 23, 24), (2, "B0", 24, 26), (2, "F1", 26, 27), (2, "B1", 27, 29),
    ]  # fmt: skip
    assert timeline.makespan == 56
    assert timeline.bubble == pytest.approx(1 - (6 + 12 + 6) / (3 * 56))


def test_a_turn_on_one_rank_costs_no_message_and_halves_cost_their_own():
    orders = ([("F", 0), ("F", 1), ("B", 1), ("I", 0), ("W", 0)],
              [("F", 0), ("F", 1), ("I", 1), ("B", 0), ("W", 1)])  # fmt: skip
    ranks = tuple(tuple(Action(kind, 0, chunk) for kind, chunk in order) for order in orders)
    costs = Costs(1, 4, backward_input=2, backward_weight=3, message=10)
    spans = simulate(Schedule("v", 1, ((0, 3), (1, 2)), ranks), costs).spans
    assert [(s.rank, str(s.action), s.start, s.end) for s in spans] == [
        (0, "F0", 0, 1), (0, "F0.1", 23, 24), (0, "B0.1", 24, 28), (0, "I0", 54, 56),
        (0, "W0", 56, 59), (1, "F0", 11, 12), (1, "F0.1", 12, 13), (1, "I0.1", 38, 40),
        (1, "B0", 40, 44), (1, "W0.1", 44, 47),
    ]  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_rank_does_two_things_at_a_time(name):
    timeline = simulate(SCHEDULES[name](4, 8), Costs(message=0.5))
    for before, after in zip(timeline.spans, timeline.spans[1:], strict=False):
        assert before.rank != after.rank or before.end <= after.start


BAD = {
    "forward": 0, "backward": -1, "backward_input": math.nan, "backward_weight": math.inf,
    "message": -0.1, "stages": (1, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_costs_that_mean_nothing(name):
    with pytest.raises(InvalidArgumentError, match="positive"):
        Costs(**{name: BAD[name]})
    with pytest.raises(InvalidArgumentError, match="each of 3 stages, got 2"):
        simulate(afab(3, 1), Costs(stages=(1, 2)))


@pytest.mark.parametrize("builder", SCHEDULES.values())
def test_stages_that_are_twice_as_fast_take_half_the_time(builder):
    schedule = builder(2, 4)
    whole = simulate(schedule).makespan
    half = Costs(stages=(0.5,) * schedule.num_stages)
    assert simulate(schedule, half).makespan == whole / 2

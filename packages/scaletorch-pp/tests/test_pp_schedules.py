"""Schedules as plain data: their orders and activations, predicted times, and pictures of both."""

import math
from itertools import groupby
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from scaletorch.dist import InvalidArgumentError
from scaletorch.parallel.pipeline_parallel import (
    SCHEDULES,
    Action,
    Costs,
    Schedule,
    Span,
    Timeline,
    afab,
    check,
    dualpipe_v,
    forward_only,
    interleaved_1f1b,
    looped_breadth_first,
    one_f_one_b,
    simulate,
    zb_h1,
    zb_v,
)
from scaletorch.parallel.pipeline_parallel.drawing import to_text

CHUNKED = [interleaved_1f1b, looped_breadth_first]
few_ranks, few_micro_batches = st.integers(1, 9), st.integers(1, 20)


def by_stage(schedule) -> list[list[tuple[str, int, int]]]:
    """Each rank's actions as (kind, stage, micro-batch)."""
    return [
        [(kind, stages[chunk], m) for kind, m, chunk in actions]
        for stages, actions in zip(schedule.stages, schedule.ranks, strict=True)
    ]


def makespan(schedule) -> float:
    return simulate(schedule).makespan


@settings(deadline=None, max_examples=40)
@given(few_ranks, few_micro_batches, st.integers(1, 3))
def test_activations_kept_alive(n, m, v):
    def peaks(schedule):
        return [*check(schedule).peak_live]

    assert peaks(afab(n, m)) == [m] * n
    assert peaks(one_f_one_b(n, m)) == [min(n - r, m) for r in range(n)]
    assert peaks(looped_breadth_first(n, m, v)) == [m * v] * n
    first_round = -(-m // max(1, m // n))
    most = [(v - 1) * first_round + 2 * (n - 1 - r) + 1 for r in range(n)]
    assert peaks(interleaved_1f1b(n, m, v)) == [min(bound, m * v) for bound in most]
    assert peaks(zb_h1(n, m)) == [min(n, m)] * n
    assert max(peaks(zb_v(n, m))) <= min(2 * n, 2 * m)
    assert max(peaks(dualpipe_v(n, m))) <= min(2 * n + 1, 2 * m)


@settings(deadline=None, max_examples=40)
@given(few_ranks, few_micro_batches, st.integers(1, 3))
def test_time_with_equal_costs(n, m, v):
    assert makespan(forward_only(n, m)) == m + n - 1
    assert makespan(afab(n, m)) == makespan(one_f_one_b(n, m)) == 3 * (m + n - 1)
    assert makespan(looped_breadth_first(n, m, v)) == 3 * ((v - 1) * max(m, n) + m + n - 1)
    if m >= n:
        assert makespan(interleaved_1f1b(n, m, v)) == 3 * (m * v + n - 1)
    assert makespan(zb_h1(n, m)) == max(3 * m + n - 1, 2 * m + 2 * n - 1)
    enough = 2 * n + m
    assert makespan(zb_v(n, enough - 1)) == 6 * (enough - 1) + n - 1
    assert makespan(dualpipe_v(n, enough)) == 6 * enough + n - 1


@settings(deadline=None, max_examples=40)
@given(few_ranks, few_micro_batches)
def test_few_micro_batches_take_no_longer_than_1f1b_of_the_same_model(n, m):
    for build in [*CHUNKED, zb_v, dualpipe_v]:  # each rank's two stages cost 1F1B's one
        assert makespan(build(n, m)) <= 2 * makespan(one_f_one_b(n, m)), build


@settings(deadline=None, max_examples=40)
@given(few_ranks, few_micro_batches)
def test_no_rank_of_zb_v_waits_once_it_has_started(n, m):
    schedule = zb_v(n, m + 2 * n - 2)
    for rank, spans in groupby(simulate(schedule).spans, key=lambda span: span.rank):
        first, *_, last = spans
        assert last.end - first.start == 6 * schedule.num_micro_batches, rank


def torch_order(schedule_class, num_ranks: int, num_micro_batches: int, num_chunks: int = 1):
    """The order of torch's class as (kind, stage, micro-batch), without any stages or ranks."""
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    itself = SimpleNamespace(
        pp_group_size=num_ranks,
        num_stages=num_ranks * num_chunks,
        n_local_stages=num_chunks,
        microbatches_per_round=num_micro_batches // max(1, num_micro_batches // num_ranks),
        _n_microbatches=num_micro_batches,
    )
    ranks = []
    for rank in range(num_ranks):
        actions = schedule_class._calculate_single_rank_operations(itself, rank)
        parts = [part for a in actions if a for part in (a.sub_actions or (a,))]
        ranks.append(
            [(kinds[a.computation_type.name], a.stage_index, a.microbatch_index) for a in parts]
        )
    return ranks


@settings(deadline=None, max_examples=40)
@given(few_ranks, few_micro_batches, st.integers(1, 3))
def test_the_orders_are_those_of_torch(n, m, v):
    theirs = torch_order(torch_schedules.ScheduleDualPipeV, n, 2 * n + m, 2)
    assert by_stage(dualpipe_v(n, 2 * n + m)) == theirs
    theirs = torch_order(torch_schedules.ScheduleInterleaved1F1B, n, n * m, v)
    assert by_stage(interleaved_1f1b(n, n * m, v)) == theirs
    theirs = torch_order(torch_schedules.ScheduleInterleavedZeroBubble, n, n * m)
    assert by_stage(zb_h1(n, n * m)) == theirs
    theirs = torch_order(torch_schedules.ScheduleZBVZeroBubble, n, m, 2)
    assert _less_w(by_stage(zb_v(n, m))) == _less_w(theirs)  # torch's last "W" go by chunk


def _less_w(ranks):
    return [[action for action in actions if action[0] != "W"] for actions in ranks]


@pytest.mark.parametrize("name", SCHEDULES)
def test_names_and_bad_numbers(name):
    build = SCHEDULES[name]
    assert build(2, 3).name == name
    bad = {(0, 1): "ranks .* got 0", (2, -1): "micro-batches .* got -1", (2, 2.5): r"got 2\.5"}
    if build in CHUNKED:
        bad[2, 2, 0] = "stages per rank .* got 0"
    for sizes, text in bad.items():
        with pytest.raises(InvalidArgumentError, match=f"the number of .*{text}"):
            build(*sizes)


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


def on_one_rank(names: str, ends: list[float], unit: str = "") -> Timeline:
    """One action after the other, such as "F0 B0"; a dot is idle time."""
    spans, start = [], 0.0
    for name, end in zip(names.split(), ends, strict=True):
        if name != ".":
            spans.append(Span(0, Action(name[0], int(name[1:])), start, end))
        start = end
    schedule = Schedule("mine", 1, ((0,),), (tuple(s.action for s in spans),))
    return Timeline(schedule, tuple(spans), unit)


def predicted(name="1f1b", ranks=2, micro_batches=3) -> Timeline:
    return simulate(SCHEDULES[name](ranks, micro_batches))


def test_a_picture_of_unit_costs():
    assert to_text(predicted(), peak=(2, 1)) == (
        "rank 0  F0 F1 ......B0--- F2 B1--- ...B2---\n"
        "rank 1  ...F0 B0--- F1 B1--- F2 B2--- ......\n"
        "\n"
        "1f1b: makespan 12, bubble 25.0 %\n"
        "peak live activations: 2 1"
    )


def test_a_picture_of_measured_times_fills_the_width():
    timeline = on_one_rank("F0 . B0 F1 . W1", [7.1, 10.3, 20.1, 20.9, 28.1, 40.7], unit="ms")
    line, _, figures = to_text(timeline, width=48).splitlines()
    assert line == "rank 0  F0---- ...B0------- F.......W1---------"
    assert figures == "mine: makespan 40.7 ms, bubble 25.6 %"
    assert len(to_text(timeline).splitlines()[0]) == 160  # less the last space: F1 has three
    assert len(to_text(on_one_rank("F0 F1", [0.1, 40])).splitlines()[0]) == 199


def test_what_cannot_be_drawn():
    with pytest.raises(InvalidArgumentError, match="the actions of 'mine' take no time"):
        to_text(on_one_rank("F0", [0]))
    with pytest.raises(InvalidArgumentError, match="a width of at least 9, got 5"):
        to_text(predicted(), width=5)

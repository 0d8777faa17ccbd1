"""Schedules as plain data: in the orders of torch, as lean and as fast as published."""

from itertools import groupby
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from scaletorch.dist import InvalidArgumentError
from scaletorch.parallel.pipeline_parallel.schedules import (
    SCHEDULES,
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


@pytest.mark.parametrize(("builder", "enough"), [(zb_v, 5), (dualpipe_v, 6)])
def test_few_micro_batches_run_the_order_of_enough(builder, enough):
    whole = builder(3, enough)
    for few in range(1, enough):
        left = [tuple(a for a in rank if a.micro_batch < few) for rank in whole.ranks]
        assert list(builder(3, few).ranks) == left

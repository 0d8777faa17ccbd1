"""Schedules as plain data: complete, in order, free of deadlock, as lean and fast as published."""

from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from scaletorch.dist import InvalidArgumentError
from scaletorch.parallel.pipeline_parallel.schedules import (
    SCHEDULES,
    afab,
    dualpipe_v,
    forward_only,
    interleaved_1f1b,
    looped_breadth_first,
    one_f_one_b,
    zb_h1,
    zb_v,
)

BUILDERS = list(SCHEDULES.values())
CHUNKED = [interleaved_1f1b, looped_breadth_first]
UNIT = {"F": 1, "B": 2, "I": 1, "W": 1}

few_ranks, few_micro_batches = st.integers(1, 9), st.integers(1, 20)


@st.composite
def built(draw):
    """Any schedule at all."""
    build = draw(st.sampled_from(BUILDERS))
    chunks = [draw(st.integers(1, 3))] if build in CHUNKED else []
    return build(draw(few_ranks), draw(few_micro_batches), *chunks)


def by_stage(schedule) -> list[list[tuple[str, int, int]]]:
    """Each rank's actions as (kind, stage, micro-batch)."""
    return [
        [(kind, stages[chunk], m) for kind, m, chunk in actions]
        for stages, actions in zip(schedule.stages, schedule.ranks, strict=True)
    ]


def finish(ranks, num_stages: int) -> tuple[list[int], list[int]]:
    """Run each rank's (kind, stage, micro-batch) as soon as what they need is there.

    Returns when each rank starts its first and ends its last, messages taking no time.
    """
    ends: dict[tuple[str, int, int], int] = {}
    first, clock, position = [None] * len(ranks), [0] * len(ranks), [0] * len(ranks)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ranks):
            while position[rank] < len(actions):
                kind, stage, m = actions[position[rank]]
                needs = _needs(kind, stage, m, num_stages)
                if not needs <= ends.keys():
                    break
                start = max(clock[rank], *(ends[need] for need in needs), 0)
                first[rank] = start if first[rank] is None else first[rank]
                clock[rank] = start + UNIT[kind]
                ends["I" if kind == "B" else kind, stage, m] = clock[rank]
                position[rank] += 1
                moved = True
    assert position == [len(actions) for actions in ranks], "not all actions can run"
    return first, clock


def _needs(kind: str, stage: int, m: int, num_stages: int) -> set[tuple[str, int, int]]:
    if kind == "F":
        return {("F", stage - 1, m)} if stage else set()
    if kind == "W":
        return {("I", stage, m)}
    later = {("I", stage + 1, m)} if stage + 1 < num_stages else set()
    return {("F", stage, m)} | later


def makespan(schedule) -> int:
    return max(finish(by_stage(schedule), schedule.num_stages)[1])


def peak_live(actions) -> int:
    live = peak = 0
    for action in actions:
        live += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
        peak = max(peak, live)
    return peak


@settings(deadline=None)
@given(built())
def test_each_stage_and_micro_batch_once_and_in_order(schedule):
    held = sorted(stage for stages in schedule.stages for stage in stages)
    assert held == list(range(schedule.num_stages))
    passes = Counter()  # a "B" counts as an "I" and a "W"
    for actions in by_stage(schedule):
        for kind, stage, m in actions:
            passes.update((part, stage, m) for part in ("IW" if kind == "B" else kind))
    kinds = "F" if schedule.name == "forward_only" else "FIW"
    micro_batches = range(schedule.num_micro_batches)
    assert passes == Counter((k, s, m) for k in kinds for s in held for m in micro_batches)


@settings(deadline=None)
@given(built())
def test_all_ranks_finish(schedule):
    finish(by_stage(schedule), schedule.num_stages)


def test_an_order_that_cannot_finish_is_found():
    with pytest.raises(AssertionError, match="not all actions"):
        finish([[("I", 0, 0), ("F", 0, 0)], [("F", 1, 0), ("I", 1, 0)]], 2)


@settings(deadline=None)
@given(few_ranks, few_micro_batches, st.integers(1, 3))
def test_activations_kept_alive(n, m, v):
    def peaks(schedule):
        return [peak_live(actions) for actions in schedule.ranks]

    assert peaks(afab(n, m)) == [m] * n
    assert peaks(one_f_one_b(n, m)) == [min(n - r, m) for r in range(n)]
    assert peaks(looped_breadth_first(n, m, v)) == [m * v] * n
    first_round = -(-m // max(1, m // n))
    most = [(v - 1) * first_round + 2 * (n - 1 - r) + 1 for r in range(n)]
    assert peaks(interleaved_1f1b(n, m, v)) == [min(bound, m * v) for bound in most]
    assert peaks(zb_h1(n, m)) == [min(n, m)] * n
    assert max(peaks(zb_v(n, m))) <= min(2 * n, 2 * m)
    assert max(peaks(dualpipe_v(n, m))) <= min(2 * n + 1, 2 * m)


@settings(deadline=None)
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


@settings(deadline=None)
@given(few_ranks, few_micro_batches)
def test_few_micro_batches_take_no_longer_than_1f1b_of_the_same_model(n, m):
    for build in [*CHUNKED, zb_v, dualpipe_v]:  # each rank's two stages cost 1F1B's one
        assert makespan(build(n, m)) <= 2 * makespan(one_f_one_b(n, m)), build


@settings(deadline=None)
@given(few_ranks, few_micro_batches)
def test_no_rank_of_zb_v_waits_once_it_has_started(n, m):
    schedule = zb_v(n, m + 2 * n - 2)
    first, last = finish(by_stage(schedule), schedule.num_stages)
    work = 6 * schedule.num_micro_batches
    assert [end - start for start, end in zip(first, last, strict=True)] == [work] * n


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


@settings(deadline=None)
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


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 2)])
@pytest.mark.parametrize("build", BUILDERS)
def test_bad_numbers(build, sizes):
    with pytest.raises(InvalidArgumentError, match="at least 1 rank and 1 micro-batch"):
        build(*sizes)


@pytest.mark.parametrize("build", BUILDERS)
def test_more_actions_than_anybody_can_hold(build):
    with pytest.raises(InvalidArgumentError, match="10000 ranks, 100000 micro-batches and"):
        build(10**4, 10**5)
    with pytest.raises(InvalidArgumentError, match=r"a whole number of micro-batches, got 2\.5"):
        build(2, 2.5)


@pytest.mark.parametrize("build", CHUNKED)
def test_no_chunks(build):
    with pytest.raises(InvalidArgumentError, match="at least 1 chunk, got 0"):
        build(2, 2, 0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_bears_its_name(name):
    assert SCHEDULES[name](2, 3).name == name


@pytest.mark.parametrize(("builder", "enough"), [(zb_v, 5), (dualpipe_v, 6)])
def test_few_micro_batches_run_the_order_of_enough(builder, enough):
    whole = builder(3, enough)
    for few in range(1, enough):
        left = [tuple(a for a in rank if a.micro_batch < few) for rank in whole.ranks]
        assert list(builder(3, few).ranks) == left

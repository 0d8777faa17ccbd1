"""Schedules as plain data: complete, in order, and free of deadlock under rendezvous semantics."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletorch.dist import InvalidArgumentError
from scaletorch.parallel.pipeline_parallel import (
    SCHEDULES,
    Action,
    Step,
    Transfer,
    afab,
    derive,
    one_f_one_b,
)

schedules = st.sampled_from(["afab", "1f1b"])
sizes = st.integers(1, 64)


def simulate(ranks: list[list[Step]]) -> list[int]:
    """Run all ranks' steps; a send completes only together with its receive.

    Returns how many steps each rank completed.
    """
    position = [0] * len(ranks)
    # What each rank still waits for in its current step.
    waiting = [_sides(steps[0]) for steps in ranks]
    work = list(range(len(ranks)))
    while work:
        rank = work.pop()
        for one, other in ((rank - 1, rank), (rank, rank - 1), (rank, rank + 1), (rank + 1, rank)):
            if _meet(ranks, position, waiting, one, other):
                waiting[one].remove("send")
                waiting[other].remove("receive")
                work += [one, other]
        if position[rank] < len(ranks[rank]) and not waiting[rank]:
            position[rank] += 1
            if position[rank] < len(ranks[rank]):
                waiting[rank] = _sides(ranks[rank][position[rank]])
            work.append(rank)
    return position


def _sides(step: Step) -> set[str]:
    return {side for side in ("send", "receive") if getattr(step, side) is not None}


def _meet(ranks, position, waiting, source: int, target: int) -> bool:
    if not (0 <= source < len(ranks) and 0 <= target < len(ranks)):
        return False
    if "send" not in waiting[source] or "receive" not in waiting[target]:
        return False
    send, receive = ranks[source][position[source]].send, ranks[target][position[target]].receive
    if send.peer != target or receive.peer != source:
        return False
    assert (send.gradient, send.micro_batch) == (receive.gradient, receive.micro_batch)
    return True


def peak_live(actions) -> int:
    live = peak = 0
    for action in actions:
        live += 1 if action.kind == "F" else -1
        peak = max(peak, live)
    return peak


@given(schedules, sizes, st.integers(1, 40), st.data())
def test_each_micro_batch_once_and_in_order(name, num_stages, num_micro_batches, data):
    stage = data.draw(st.integers(0, num_stages - 1))
    actions = SCHEDULES[name](num_stages, num_micro_batches).ranks[stage]
    micro_batches = list(range(num_micro_batches))
    assert [a.micro_batch for a in actions if a.kind == "F"] == micro_batches
    assert [a.micro_batch for a in actions if a.kind == "B"] == micro_batches
    for m in micro_batches:
        assert actions.index(Action("F", m)) < actions.index(Action("B", m))


@given(schedules, sizes, st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_all_stages_finish_where_a_send_waits_for_its_receive(name, num_stages, num_micro_batches):
    ranks = [
        derive(SCHEDULES[name](num_stages, num_micro_batches).ranks[stage], stage, num_stages)
        for stage in range(num_stages)
    ]
    assert simulate(ranks) == [len(steps) for steps in ranks]


def test_the_simulation_finds_a_deadlock():
    first = [Step(Transfer(1, False, 0), None, None), Step(None, Transfer(1, True, 0), None)]
    second = [Step(Transfer(0, True, 0), None, None), Step(None, Transfer(0, False, 0), None)]
    assert simulate([first, second]) == [0, 0]


@given(sizes, st.integers(1, 40), st.data())
def test_activations_kept_alive(num_stages, num_micro_batches, data):
    stage = data.draw(st.integers(0, num_stages - 1))
    assert peak_live(afab(num_stages, num_micro_batches).ranks[stage]) == num_micro_batches
    bound = min(num_stages - stage, num_micro_batches)
    assert peak_live(one_f_one_b(num_stages, num_micro_batches).ranks[stage]) == bound


def test_derived_transfers_of_a_middle_stage():
    steps = derive(one_f_one_b(3, 2).ranks[1], 1, 3)
    assert steps == [
        Step(None, Transfer(0, False, 0), Action("F", 0)),
        Step(Transfer(2, False, 0), Transfer(0, False, 1), Action("F", 1)),
        Step(Transfer(2, False, 1), Transfer(2, True, 0), Action("B", 0)),
        Step(Transfer(0, True, 0), Transfer(2, True, 1), Action("B", 1)),
        Step(Transfer(0, True, 1), None, None),
    ]


def test_one_stage_sends_nothing():
    steps = derive(one_f_one_b(1, 2).ranks[0], 0, 1)
    assert [s.action for s in steps[:-1]] == [
        Action("F", 0),
        Action("B", 0),
        Action("F", 1),
        Action("B", 1),
    ]
    assert not any(step.send or step.receive for step in steps)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 2)])
@pytest.mark.parametrize("schedule", [afab, one_f_one_b])
def test_bad_numbers(schedule, sizes):
    with pytest.raises(InvalidArgumentError, match="at least 1 rank and 1 micro-batch"):
        schedule(*sizes)

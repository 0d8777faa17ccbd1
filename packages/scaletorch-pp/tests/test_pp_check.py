"""The checker against a brute-force executor: it refuses what cannot run, and nothing else."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletorch.parallel.pipeline_parallel import (
    SCHEDULES,
    Action,
    Schedule,
    ScheduleError,
    afab,
    check,
    one_f_one_b,
)
from scaletorch.parallel.pipeline_parallel.schedules.schedule import Task
from scaletorch.parallel.pipeline_parallel.schedules.simulate import Receive, Send, plan_of


def programs_of(schedule):
    ranks = range(schedule.num_ranks)
    sizes = schedule.num_ranks, schedule.num_micro_batches
    return [plan_of(schedule, *sizes, rank).program for rank in ranks]


SIZES = [(1, 1), (1, 3), (2, 1), (2, 4), (3, 5), (4, 8), (6, 3)]
ROUNDS = 8


def brute_force(schedule: Schedule) -> bool:
    """Return whether a schedule runs to its end and computes all, with sets and no cleverness."""
    num_stages, size = schedule.num_stages, schedule.num_micro_batches
    if sorted(s for own in schedule.stages for s in own) != list(range(num_stages)):
        return False
    queues = []
    for stages, actions in zip(schedule.stages, schedule.ranks, strict=True):
        if any(a.kind not in "FBIW" or a.chunk not in range(len(stages)) for a in actions):
            return False
        queues.append([(a.kind, stages[a.chunk], a.micro_batch) for a in actions])
    done: set[tuple[str, int, int]] = set()  # "G" is the gradient that a B or an I makes
    moved = True
    while moved:
        moved = False
        for queue in queues:
            while queue and needs(queue[0], num_stages) <= done:
                kind, *place = action = queue.pop(0)
                if action in done:
                    return False
                done |= {action, ("G", *place)} if kind in "BI" else {action}
                moved = True
    if any(queues) or any(m not in range(size) for _, _, m in done):
        return False
    made = {(stage, m): Counter() for stage in range(num_stages) for m in range(size)}
    for kind, *place in done:
        made[tuple(place)][kind] += 1
    right = [Counter("FBG"), Counter("FIGW")]
    return all(k == Counter("F") for k in made.values()) or all(k in right for k in made.values())


def needs(action, num_stages):
    kind, stage, m = action
    if kind == "F":
        return {("F", stage - 1, m)} - {("F", -1, m)}
    if kind == "W":
        return {("I", stage, m)}
    return {("F", stage, m), ("G", stage + 1, m)} - {("G", num_stages, m)}


def programs_run(programs):
    """Return whether programs run to their end if each send waits for its receive."""
    queues = [list(program) for program in programs]
    have = [{None} for _ in queues]  # what each rank has made or received
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            if not queue or isinstance(queue[0], Receive):
                continue
            first = queue[0]
            if isinstance(first, Send):
                other = queues[first.peer]
                if not other or not isinstance(other[0], Receive) or other[0].peer != rank:
                    continue
                if other.pop(0).key != first.key or first.key not in have[rank]:
                    return False
                have[first.peer].add(first.key)
            elif first.needs not in have[rank]:
                return False
            else:
                have[rank].add(first.makes)
            queue.pop(0)
            moved = True
    return not any(queues)


ALL = [build(*size) for build in SCHEDULES.values() for size in SIZES]


def swapped(ops, rng, near):
    one = rng.randrange(len(ops))
    other = min(one + 1, len(ops) - 1) if near else rng.randrange(len(ops))
    ops[one], ops[other] = ops[other], ops[one]


def retargeted(ops, rng, **choices):
    place = rng.randrange(len(ops))
    field = rng.choice(list(choices))
    ops[place] = ops[place]._replace(**{field: rng.choice(choices[field])})


def mutants(schedule: Schedule, rng):
    """Give a schedule one change of each sort."""
    size = schedule.num_micro_batches
    changes = {
        "swap": lambda ops: swapped(ops, rng, near=False),
        "swap neighbours": lambda ops: swapped(ops, rng, near=True),
        "drop": lambda ops: ops.pop(rng.randrange(len(ops))),
        "double": lambda ops: ops.insert(rng.randrange(len(ops) + 1), rng.choice(ops)),
        "micro-batch": lambda ops: retargeted(ops, rng, micro_batch=range(-1, size + 1)),
        "chunk": lambda ops: retargeted(ops, rng, chunk=(-1, 0, 1, 2)),
        "kind": lambda ops: retargeted(ops, rng, kind="FBIWX"),
        "reverse": lambda ops: ops.reverse(),
    }
    for change in changes.values():
        rank = rng.randrange(schedule.num_ranks)
        ops = list(schedule.ranks[rank])
        change(ops)
        before, after = schedule.ranks[:rank], schedule.ranks[rank + 1 :]
        yield replace(schedule, ranks=(*before, tuple(ops), *after))
    one, other = rng.randrange(schedule.num_ranks), rng.randrange(schedule.num_ranks)
    ranks = [list(actions) for actions in schedule.ranks]
    ranks[other].insert(0, ranks[one].pop(rng.randrange(len(ranks[one]))))
    yield replace(schedule, ranks=tuple(map(tuple, ranks)))
    stages = [list(own) for own in schedule.stages]
    stages[one][0] = rng.randrange(schedule.num_stages + 1)
    yield replace(schedule, stages=tuple(map(tuple, stages)))


def refused(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except ScheduleError:
        return True
    return False


def test_every_mutant_that_cannot_run_is_refused_and_no_other():
    rng = random.Random(0)
    verdicts = Counter()
    for schedule in ALL:
        for _ in range(ROUNDS):
            for mutant in mutants(schedule, rng):
                runs = brute_force(mutant)
                assert refused(check, mutant) != runs, f"{mutant.name}: runs={runs}\n{mutant}"
                verdicts[runs] += 1
    assert verdicts[False] >= 800
    assert verdicts[True] >= 40  # such as two forwards that may change places


@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 9), st.integers(1, 20), st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_no_schedule_of_ours_is_refused_nor_its_messages(name, num_ranks, num_micro_batches, v):
    chunks = [v] if name in ("interleaved_1f1b", "looped_bfs") else []
    schedule = SCHEDULES[name](num_ranks, num_micro_batches, *chunks)
    assert brute_force(schedule)
    programs = programs_of(schedule)
    for program, actions in zip(programs, schedule.ranks, strict=True):
        assert tuple(each.action for each in program if isinstance(each, Task)) == actions
    assert programs_run(programs)
    report = check(schedule)
    assert sum(report.actions.values()) == sum(map(len, schedule.ranks))
    assert report.messages == sum(isinstance(op, Send) for p in programs for op in p)


def test_the_report():
    report = check(one_f_one_b(4, 8))
    assert report.peak_live == (4, 3, 2, 1)
    assert report.actions == {"F": 32, "B": 32}
    assert report.messages == 3 * 8 * 2
    assert check(afab(3, 5)).peak_live == (5, 5, 5)
    split = tuple(Action(kind, m) for kind in "FIW" for m in range(2))
    assert check(Schedule("split", 2, ((0,),), (split,))).peak_live == (2,)
    forwards = Schedule("forwards", 2, ((0,), (1,)), (split[:2],) * 2)
    assert check(forwards).peak_live == (0, 0)
    assert check(forwards).messages == 2


def schedule_of(*lines, size=2, stages=None):
    actions = tuple(tuple(Action(op[0], int(op[1:])) for op in line.split()) for line in lines)
    return Schedule("own", size, stages or tuple((r,) for r in range(len(lines))), actions)


LOOP = Schedule(
    "loop",
    1,
    tuple((rank, rank + 6) for rank in range(6)),
    ((Action("F", 0, 1), Action("F", 0)), *((Action("F", 0), Action("F", 0, 1)),) * 5),
)
WRONG = [
    (schedule_of("F0 B0 F1 B1", "F0 F1 B0 B1"), "rank 0 waits at B0 for B0 of stage 1 on rank 1, "
     "which waits at F1 for F1 of stage 0 on rank 0$"),
    (LOOP, "rank 0 waits at F0.1 for F0 of stage 5 on rank 5, which .* rank 4, which .* rank 3, "
     "which waits .* on rank 2, and so on, 6 ranks in a circle"),
    (schedule_of("F0 F1 B0", "F0 F1 B0 B1"), r"rank 0: B1 of stage 0 is missing \(or I and W"),
    (schedule_of("F0 B0 B1"), "action 2 .B1.: before it the stage has no action of its mic"),
    (schedule_of("F0 W0 I0", size=1), "action 1 .W0.: before it the stage has F of its"),
    (schedule_of("F0 B0 W0", size=1), "has F and B of its micro-batch; the order is one F"),
    (schedule_of("F0 I0", size=1), "W0 of stage 0 is missing; its weight gradients"),
    (schedule_of("F0 F1 F0"), "rank 0, action 2 .F0.: before it the stage has F of its mic"),
    (schedule_of("F0 F2"), "action 1 .F2.: .* micro-batches are 0 to 1, and"),
    (schedule_of("F0 X1"), "kinds are F, B, I, W, micro"),
    (schedule_of("F0", stages=((0,), (1,))), "stages of 2 ranks, actions of 1"),
    (schedule_of("F0", "F0", stages=((0,), (0,))), r"exactly one rank, got \[0, 0\]"),
    (schedule_of("", size=0), "at least 1 micro-batch, got 0"),
    (Schedule("own", 1, ((0,),), ((Action("F", 0, 1),),)), "action 0 .F0.1.: .* chunks 0 to 0"),
    (Schedule("own", 1, ((0,),), ((Action("F", 0, -1),),)), "action 0 .*: .* chunks 0 to 0"),
    (Schedule("own", 1, ((1, 0),), ((Action("F", 0), Action("F", 0, 1)),)),
     "rank 0 waits at F0 for F0 of stage 0 on rank 0"),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "message"), WRONG)
def test_what_is_wrong_and_where(schedule, message):
    with pytest.raises(ScheduleError, match=message):
        check(schedule)
    with pytest.raises(ScheduleError, match=message):
        programs_of(schedule)

"""Pairs of actions: what may be one, how two works take turns, and what a thread is given."""

import contextvars
import threading
import traceback

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from scaletorch.parallel.pipeline_parallel import ScheduleError, check, dualpipe_v, from_csv
from scaletorch.parallel.pipeline_parallel.runtime.baton import Baton
from scaletorch.parallel.pipeline_parallel.runtime.program import in_steps, plan_of
from scaletorch.parallel.pipeline_parallel.schedules.messages import Receive, program_of
from scaletorch.parallel.pipeline_parallel.schedules.simulate import proven


def test_the_pairs_of_dualpipe_v():
    schedule = dualpipe_v(2, 4)
    assert str(schedule) == (
        "F0 F1 F2 F0.1 I0.1 W0.1 F1.1 F3+B1.1 F2.1+B0 B2.1 F3.1+B1 B3.1 I2 W2 I3 W3\n"
        "F0 F0.1 F1 F1.1 F2+B0.1 F2.1+B0 F3+B1.1 F3.1+B1 B2.1 B2 I3.1 I3 W3.1 W3"
    )
    assert schedule.pairs == ((7, 9, 12), (4, 6, 8, 10))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 4, 11])
def test_both_inputs_of_a_pair_are_asked_for_before_it(num_ranks, micro_batches):
    schedule = dualpipe_v(num_ranks, micro_batches)
    numbered, times = proven(schedule, together=True)
    programs = [program_of(numbered, times, rank) for rank in range(num_ranks)]
    for rank, program in enumerate(programs):
        for place in schedule.pairs_of(rank):
            forward, backward = schedule.ranks[rank][place : place + 2]
            own = schedule.stages[rank][backward.chunk]
            between = program[program.index(forward) : program.index(backward)]
            received = [op for op in between if isinstance(op, Receive) and op.gradient]
            assert (own + 1, backward.micro_batch) not in [op[1:3] for op in received]
        steps = in_steps(program, schedule.stages[rank], 2 * num_ranks, 0, schedule.pairs_of(rank))
        led = [str(step.task.action) for step in steps if step.leads]
        assert led == [text.partition("+")[0] for text in schedule.texts(rank) if "+" in text]


def test_ranks_are_told_apart_that_run_pairs():
    one, other = (plan_of("dualpipe_v", 2, 4, 0, together=each) for each in (True, False))
    assert one.text == other.text + " in pairs"


TWO = "F0,F1,F0.1,B0.1,F1.1,B0,B1.1,B1"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["0 1,F0+F0.1,B0.1,B0"], "rank 0, action 0: a pair .* got F0 and F0.1"),
        (["0 1,F0,F0.1+B0.1,B0"], "a backward of another chunk, got F0.1 and B0.1"),
        (["0 1,F0,F0.1,I0.1+W0.1,B0"], "got I0.1 and W0.1"),
        (
            [f"0 2,{TWO.replace('F1.1,B0', 'F1.1+B0')}", f"1 3,{TWO}"],
            "rank 0 waits at F1.1 for B0 of stage 1 on rank 1, "
            "which waits at F1.1 for F1 of stage 2 on rank 0",
        ),
    ],
)
def test_what_is_no_pair(rows, message):
    schedule = from_csv("\n".join(rows))
    with pytest.raises(ScheduleError, match=message):
        check(schedule)


def both(first, second, asides=None):
    """Run two works that are given what hands over; return what was put aside and back."""
    asides = [] if asides is None else asides

    def set_aside():
        asides.append("aside")
        return lambda: asides.append("back")

    baton = Baton(set_aside)
    baton.run(lambda: first(baton.hand_over), lambda: second(baton.hand_over))
    return baton


def counting(done, name, times):
    def work(hand_over):
        for number in range(times):
            done.append(f"{name}{number}")
            hand_over()
        done.append(f"{name} ends")

    return work


@pytest.mark.parametrize(
    ("first", "second", "order"),
    [
        (2, 2, "a0 b0 a1 b1 a ends b ends"),
        (3, 1, "a0 b0 a1 b ends a2 a ends"),
        (1, 3, "a0 b0 a ends b1 b2 b ends"),
        (0, 1, "a ends b0 b ends"),
    ],
)
def test_they_take_turns(first, second, order):
    done, asides = [], []
    both(counting(done, "a", first), counting(done, "b", second), asides)
    assert " ".join(done) == order
    assert asides[-1] == "back"
    assert asides.count("aside") == asides.count("back")


def fails_in_here():
    raise ValueError("my own bug")


@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize("turns", [0, 1])
def test_what_one_raises_ends_the_other(guilty, turns):
    ended = []

    def failing(hand_over):
        for _ in range(turns):
            hand_over()
        fails_in_here()

    def waiting(hand_over):
        try:
            for _ in range(5):
                try:
                    hand_over()
                except Exception:  # what a model may have around its layers
                    pytest.fail("a handler of errors has caught it")
        finally:
            ended.append(True)

    works = (failing, waiting) if guilty == 0 else (waiting, failing)
    before = threading.active_count()
    with pytest.raises(ValueError, match="my own bug") as raised:
        both(*works)
    names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert names[-1] == "fails_in_here"
    assert "failing" in names
    assert ended or (guilty, turns) == (0, 0)  # the second has not begun
    assert threading.active_count() == before


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


VARIABLE = contextvars.ContextVar("variable", default=0)


def of_thread():
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        [type(m) for m in torch.overrides._get_current_function_mode_stack()],
        [type(m) for m in torch.utils._python_dispatch._get_current_dispatch_mode_stack()],
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        VARIABLE.get(),
    )


PLAIN = of_thread()


def test_the_second_has_what_torch_keeps_for_a_thread():
    seen = []
    token = VARIABLE.set(3)
    with (
        torch.no_grad(),
        Functions(),
        Dispatches(),
        torch.autograd.graph.saved_tensors_hooks(id, id),
        torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    ):
        both(lambda hand_over: None, lambda hand_over: seen.append(of_thread()))
        assert seen == [of_thread()]
        assert seen != [PLAIN]
    VARIABLE.reset(token)
    both(lambda hand_over: None, lambda hand_over: seen.append(of_thread()))
    assert seen[1] == PLAIN


def test_the_end_of_autocast_in_the_second_leaves_what_the_first_has_cast():
    weight, graphs = torch.ones(2, 2, requires_grad=True), []

    def first(hand_over):
        for _ in range(2):
            cast = torch.mm(torch.ones(1, 2), weight).grad_fn.next_functions[1][0]
            graphs.append(cast)
            hand_over()

    def second(hand_over):
        with torch.autocast("cpu", enabled=False):
            pass

    with torch.autocast("cpu", dtype=torch.bfloat16):
        both(first, second)
    assert graphs[0] is graphs[1]
    assert "ToCopy" in graphs[0].name()

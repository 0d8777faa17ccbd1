"""A few faults of each kind of the guard's campaign, and programs without one; see benchmarks."""

import pytest
from benchmarks.guard.faults import run, run_body
from benchmarks.guard.programs import KINDS, make_program
from benchmarks.guard.training import body, judge, make_training
from sweeps import today

SEEDS = {"kill": (0, 1), "shape": (0, 1), "skip": (0, 1)}


CASES = [(kind, seed) for kind in KINDS for seed in SEEDS.get(kind, (0,))]


@pytest.mark.parametrize(("kind", "seed"), today(CASES, 12))
def test_a_fault_is_named_on_every_surviving_rank(kind, seed):
    result = run(make_program(seed, kind))
    if kind == "stride":  # is no fault: any strides are right
        assert result["right"], result
    else:
        assert (result["hang"], result["silent"], result["named"]) == (False, False, True), result


@pytest.mark.parametrize("seed", today(range(3), 3))
def test_programs_without_a_fault_go_through(seed):
    result = run(make_program(seed, None, steps=40))
    assert result["right"], result


@pytest.mark.parametrize("kind", today(["loss", "dtype", "swallows", "bit"], 4))
def test_a_fault_in_training_is_named(kind):
    result = run_body(body, make_training(0, kind), judge, init=False)
    assert (result["hang"], result["silent"], result["named"]) == (False, False, True), result

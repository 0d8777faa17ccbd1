"""Schedules as CSV: an exact round trip, by hand, and each mistake named with its place."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletorch.dist import InvalidArgumentError
from scaletorch.parallel.pipeline_parallel.schedules import (
    SCHEDULES,
    Action,
    from_csv,
    to_csv,
    zb_v,
)

names = st.sampled_from(list(SCHEDULES))


@settings(deadline=None)
@given(names, st.integers(1, 9), st.integers(1, 20))
def test_round_trip(name, num_ranks, num_micro_batches):
    schedule = SCHEDULES[name](num_ranks, num_micro_batches)
    assert from_csv(to_csv(schedule), name) == schedule


def test_what_is_written():
    schedule = zb_v(2, 1)
    assert to_csv(schedule) == (
        "0 3,F0,F0.1,I0.1,W0.1,I0,W0\n"  # a line for each rank
        "1 2,F0,F0.1,I0.1,W0.1,I0,W0\n"
    )


def test_csv_by_hand_with_bubbles():
    schedule = from_csv("0 , F0,F1,,,B0,\r\n,,,\r\n\r\n1,,F0,B0,F1.0\r\n", "mine")
    assert (schedule.name, schedule.num_micro_batches) == ("mine", 2)
    assert schedule.stages == ((0,), (1,))
    assert str(schedule) == "F0 F1 B0\nF0 B0 F1"
    assert schedule.ranks[1][2] == Action("F", 1, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,F0,hello", "row 1, column 3: expected an action, such as F3 or, .* got 'hello'"),
        ("0,F0\n1,F0,F1.", "row 2, column 3: expected an action"),
        ("0,F", "row 1, column 2: expected an action"),
        ("0,F0,X3", "row 1, column 3: X3 is of no known kind; the kinds are F, B, I, W"),
        ("0,f0", "row 1, column 2: f0 is of no known kind"),
        ("0,F-1", "row 1, column 2: F-1 has a negative number"),
        ("0,F1.-1", "F1.-1 has a negative number"),
        ("\n0 1,F0\n2,F0,F0.1", "row 3, column 3: F0.1 is of a chunk .* its last is 0"),
        ("F0,B0", "row 1, column 1: expected the rank's stages, such as 0 or 0 7, got 'F0'"),
        (",F0", "row 1, column 1: expected the rank's stages"),
        ("0;F0;B0", "row 1, column 1: expected the rank's stages"),
        ("0,F0\n0,F0", r"each once; got \[\[0\], \[0\]\]"),
        ("0,F0\n2,F0", "stages 0, 1, 2 and so on"),
        ("-1,F0", "each once"),
        ("", "at least one stage"),
        ("0\n1", "needs actions, got none"),
    ],
)
def test_bad_csv(text, message):
    with pytest.raises(InvalidArgumentError, match=message):
        from_csv(text)


@settings(deadline=None)
@given(st.text('0123 ,FBIW.-"\n\r\x00é;9', max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        schedule = from_csv(text)
    except InvalidArgumentError:
        return
    assert from_csv(to_csv(schedule)) == schedule

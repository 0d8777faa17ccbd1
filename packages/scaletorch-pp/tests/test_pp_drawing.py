"""Pictures of timelines, predicted and measured."""

import pytest

from scaletorch.dist import InvalidArgumentError
from scaletorch.parallel.pipeline_parallel import (
    SCHEDULES,
    Action,
    Schedule,
    Span,
    Timeline,
    simulate,
)
from scaletorch.parallel.pipeline_parallel.drawing import to_text


def on_one_rank(names: str, ends: list[float], unit: str = "", stages=((0,),)) -> Timeline:
    """One action after the other, such as "F0 B0.1"; a dot is idle time."""
    spans, start = [], 0.0
    for name, end in zip(names.split(), ends, strict=True):
        if name != ".":
            micro_batch, _, chunk = name[1:].partition(".")
            action = Action(name[0], int(micro_batch), int(chunk or 0))
            spans.append(Span(0, action, start, end))
        start = end
    schedule = Schedule("mine", 1, stages, (tuple(s.action for s in spans),))
    return Timeline(schedule, tuple(spans), unit)


def predicted(name="1f1b", ranks=2, micro_batches=3) -> Timeline:
    return simulate(SCHEDULES[name](ranks, micro_batches))


def test_text_in_cells():
    assert to_text(predicted(), peak=(2, 1)) == (
        "rank 0  F0 F1 .. .. B0--- F2 B1--- .. B2---\n"
        "rank 1  .. F0 B0--- F1 B1--- F2 B2--- .. ..\n"
        "\n"
        "1f1b: makespan 12, bubble 25.0 %\n"
        "peak live activations: 2 1"
    )


@pytest.mark.parametrize(
    ("names", "ends", "stages", "line"),
    [
        ("F9 . F10 B9 B10", [1, 2, 3, 5, 7], ((0,),), "F9  ... F10 B9----- B10----"),
        ("F0 F0.1 I0.1 W0.1", [2, 4, 6, 8], ((0, 1),), "F0 f0 i0 w0"),
        ("F0 F0.1 B0.2", [1, 2, 4], ((0, 1, 2),), "F0   F0.1 B0.2-----"),
        ("F0 . B0", [0.2, 0.3, 0.6], ((0,),), "F0--- .. B0------"),  # in halves of the shortest
    ],
)
def test_cells_of_numbers_chunks_and_units(names, ends, stages, line):
    text = to_text(on_one_rank(names, ends, stages=stages))
    assert text.splitlines()[0] == f"rank 0  {line}"
    assert text.endswith("in lower case: each rank's second stage") == (len(stages[0]) == 2)


def test_measured_times_fill_the_width():
    timeline = on_one_rank("F0 . B0 F1 . W1", [7.1, 10.3, 20.1, 20.9, 28.1, 40.7], unit="ms")
    line, _, figures, column = to_text(timeline, width=48).splitlines()
    assert line == "rank 0  F0-----...B0--------F.......W1----------"
    assert figures == "mine: makespan 40.7 ms, bubble 25.6 %"
    assert column == "one column is 1.0175 ms"
    assert max(map(len, to_text(timeline).splitlines())) == 120


def test_cells_that_are_too_wide_become_shares_of_the_width():
    timeline = predicted("afab", 4, 8)
    lines = to_text(timeline, width=60).splitlines()
    assert {len(line) for line in lines[:4]} == {60}
    assert all(line.count("F") == line.count("B") == 8 for line in lines[:4])


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_shows_every_action(name):
    timeline = predicted(name, 4, 8)
    lines = to_text(timeline).splitlines()
    for rank, actions in enumerate(timeline.schedule.ranks):
        cells = [c.rstrip("-") for c in lines[rank].split()[2:] if c != ".."]
        wanted = [f"{a.kind}{a.micro_batch}" for a in actions]
        assert [c.upper() for c in cells] == wanted
        assert [c.islower() for c in cells] == [a.chunk == 1 for a in actions]


def test_what_cannot_be_drawn():
    with pytest.raises(InvalidArgumentError, match="the actions of 'mine' take no time"):
        to_text(on_one_rank("F0", [0]))
    with pytest.raises(InvalidArgumentError, match="a width of at least 9, got 5"):
        to_text(predicted(), width=5)

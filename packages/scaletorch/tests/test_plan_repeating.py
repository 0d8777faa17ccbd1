"""Pipelines repeat themselves: what is followed of one holds as much as all of it."""

import pytest
from planned.drawing import Case
from planned.models import described

from scaletorch.parallel.pg_manager import Grid
from scaletorch.plan import Layout
from scaletorch.plan.gradients import brought
from scaletorch.plan.holding import live, under_way
from scaletorch.plan.memory import busy, memory

SCHEDULES = [
    ("1f1b", 1), ("afab", 1), ("zb_h1", 1), ("interleaved_1f1b", 1),
    ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("zb_v", 2), ("dualpipe_v", 2),
]  # fmt: skip


def all_of(_, __, micro_batches):
    return micro_batches


def layouts(name, chunks):
    for ranks in (1, 2, 3, 4, 7, 12):
        some = range(1, 3 * ranks + 15, 1 + (ranks > 2)) if ranks < 8 else ()
        for micro_batches in (*some, 4 * ranks + 1, 5 * ranks, 41):
            grid = Grid(pp=ranks)
            yield Layout(grid, schedule=name, chunks=chunks, micro_batches=micro_batches)


def found(layout, which):
    kept = live.most_live(layout.schedule, layout.grid.pp, layout.micro_batches, layout.chunks)
    comes = brought.most_brought(layout, which) if layout.schedule != "afab" else ()
    return kept, under_way.under_way(layout), under_way.at_last(layout), comes


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_more_micro_batches_than_are_followed_hold_no_more(name, chunks, monkeypatch):
    for at, layout in enumerate(layouts(name, chunks)):
        which = ("first", "each", "last")[at % 3]
        few = found(layout, which)
        with monkeypatch.context() as patch:
            patch.setattr(live, "enough", all_of)
            patch.setattr(under_way, "followed", all_of)
            patch.setattr(brought, "followed", all_of)
            assert found(layout, which) == few, layout


def test_few_are_followed_of_many():
    for name, _ in SCHEDULES:
        if name != "afab":  # which keeps all micro-batches
            assert live.enough(name, 16, 4096) <= 32
            assert under_way.followed(name, 16, 4096) <= 48


@pytest.mark.parametrize("recompute", ["none", "full", "selective", "offload"])
def test_what_waits_for_the_next_sweep_is_less_than_what_is_kept_later(recompute, monkeypatch):
    case = Case("llama", 4, False, "float32", 16, Layout(Grid(pp=2), recompute=recompute))
    known = described(case)
    for dp, zero in ((1, 0), (2, 1), (2, 2)):
        layout = Layout(
            Grid(pp=2, dp=dp), recompute=recompute, zero=zero, schedule="looped_bfs", chunks=2,
            micro_batches=30,
        )  # fmt: skip
        few = memory(known, layout)
        with monkeypatch.context() as patch:
            for module in (under_way, brought, busy):
                patch.setattr(module, "followed", all_of)
            assert memory(known, layout) == few

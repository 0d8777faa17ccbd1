"""The arithmetic of a plan on small descriptions made by hand, and on schedules as data."""

import pickle
import re
from dataclasses import replace
from itertools import cycle, product

import pytest

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.parallel.pg_manager import Grid, legal_layouts
from scaletorch.parallel.pipeline_parallel import building, check
from scaletorch.plan import (
    Affine,
    Behaviour,
    Block,
    Cluster,
    Cut,
    Description,
    Device,
    Layout,
    Link,
    Optimizer,
    Options,
    Parameter,
    Sent,
    plan,
)
from scaletorch.plan.known import Known
from scaletorch.plan.memory import IN_FLIGHT, memory, peak
from scaletorch.plan.stages import alive, places, schedule_of, stages_of

SCHEDULES = [
    ("1f1b", 1), ("afab", 1), ("zb_h1", 1), ("looped_bfs", 3), ("interleaved_1f1b", 1),
    ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("zb_v", 2), ("dualpipe_v", 2),
]  # fmt: skip


def parameter(name, elements, tp):
    return Parameter(name, elements, 4, -(-elements // tp))


def sketch(layers=8, tied=False, sizes=(1, 2, 4)):
    """Return a model whose layers keep 1,000 bytes a row, and hand on 40."""
    cuts = {}
    for tp in sizes:
        for cp in sizes:
            hand = Affine(0, 40)
            said = (Sent("tp", "all_reduce", "forward", 2, Affine(0, 10)),
                    Sent("tp", "all_reduce", "backward", 2, Affine(0, 10)))  # fmt: skip
            cuts[Cut(tp, cp, cp_method="ring" if cp > 1 else "")] = (
                Behaviour((parameter("e", 300, tp),), kept=Affine(0, 50), handed=hand),
                Behaviour(
                    (parameter("w", 101, tp), parameter("b", 10, tp)), kept=Affine(8, 1000),
                    shared=Affine(5), entered=Affine(0, 40),
                    backward_peak=Affine(0, 30), handed=hand, sent=said if tp > 1 else (),
                ),
                Behaviour(
                    (parameter("n", 10, tp), parameter("h", 300, tp)), kept=Affine(0, 200),
                    forward_peak=Affine(0, 100),
                ),
            )  # fmt: skip
    line = [Block("e", 0, "first"), *(Block(f"l.{at}", 1, "layer") for at in range(layers))]
    ties = (("0.e", "2.h"),) if tied else ()
    return Description(
        "sketch", 16, "float32", (*line, Block("h", 2, "last")), cuts,
        {Cut(2, 1, 1, True): "no shares of sequences here"}, ties,
    )  # fmt: skip


def cluster(ranks, memory=2**20):
    return Cluster(ranks, Device("d", memory, {}, 1.0), (Link(ranks, 1e-6, 1e9),))


def test_blocks_lie_on_stages_as_the_pipeline_spreads_them():
    layout = Layout(Grid(pp=3), schedule="interleaved_1f1b", chunks=2)
    assert places(sketch(layers=8), layout) == (
        ((0, 1, 2), (6,)),
        ((3, 4), (7,)),
        ((5,), (8, 9)),
    )
    found = [at for rank in places(sketch(layers=8), layout) for chunk in rank for at in chunk]
    assert sorted(found) == list(range(10))
    with pytest.raises(InvalidArgumentError, match="8 layers are fewer than 12 stages"):
        places(sketch(layers=8), replace(layout, grid=Grid(pp=6)))
    with pytest.raises(InvalidArgumentError, match="zb_v has 2 chunks"):
        places(sketch(), Layout(Grid(pp=2), schedule="zb_v"))
    with pytest.raises(InvalidArgumentError, match="'forward_only' is not one of afab"):
        places(sketch(), Layout(Grid(pp=2), schedule="forward_only"))


@pytest.mark.parametrize("tied", [False, True])
def test_ranks_together_hold_the_whole_model(tied):
    known = sketch(tied=tied)
    whole = 4 * known.elements
    for name, chunks in SCHEDULES:
        for pp in (1, 2, 4)[: 3 if chunks < 3 else 2]:
            if pp == 1 and chunks > 1:
                continue
            layout = Layout(Grid(pp=pp), schedule=name, chunks=chunks, micro_batches=2)
            held = sum(each.parameters for each in memory(known, layout))
            twice = tied and pp > 1 and name not in ("zb_v", "dualpipe_v")
            assert held == whole + 1200 * twice, layout
    assert known.elements == 300 + 8 * 111 + 10 + (0 if tied else 300)


def test_a_layout_is_what_parallelize_takes():
    layout = Layout(Grid(), recompute="selective")
    with pytest.raises(InvalidArgumentError, match="sketch is not described with selective"):
        memory(sketch(), layout)
    assert layout.arguments()["recompute"] == "selective"
    assert Layout(Grid(pp=2), recompute="full", zero=1).arguments()["recompute"] is True


def test_every_grid_is_planned_or_refused_with_a_reason():
    found = plan(sketch(), 24, cluster(16))
    grids = {each.layout.grid for each in found.estimates} | {each.grid for each in found.refused}
    assert grids == {*legal_layouts(16)}
    assert found.best() == found.estimates[0]
    assert all(each.layout.grid.world_size == 16 for each in found.estimates)
    told = {each.why for each in found.refused}
    assert "24 rows are no multiple of dp 16 x 1 rows of a micro-batch" in told
    assert "8 layers are fewer than pp 16 x 1 chunks: each stage needs one" in told
    assert "sketch is not described for tp 16, cp 1" in told


def test_memory_is_saved_only_where_it_must_be():
    known = sketch(sizes=(1,))
    everything = plan(known, 64, cluster(2), options=Options(schedules=(("1f1b", 1),)))
    assert {each.layout.recompute for each in everything.estimates} == {"none"}
    assert {e.layout.zero for e in everything.estimates if e.layout.grid.dp > 1} == {1}
    most = min(each.peak for each in everything.estimates)
    less = plan(known, 64, cluster(2, most - 1), options=Options(schedules=(("1f1b", 1),)))
    assert less.estimates
    assert all((e.layout.zero, e.layout.recompute) != (1, "none") for e in less.estimates)
    assert all(each.peak < most for each in less.estimates)
    nothing = plan(known, 64, cluster(2, 1000))
    told = re.compile(r"needs [\d.]+ KiB of 1000 B, with zero \d and recompute \w+")
    assert any(told.fullmatch(each.why) for each in nothing.refused)
    with pytest.raises(InvalidArgumentError, match="no layout of 2 ranks can train sketch: TP"):
        nothing.best()


def test_zero_3_has_no_pipeline():
    options = Options(zero=(3,))
    found = plan(sketch(), 64, cluster(8), options=options)
    layouts = [each.layout for each in found.estimates]
    assert any(layout.zero == 3 for layout in layouts)
    assert all(layout.grid.pp == 1 or layout.zero == 0 for layout in layouts)
    refused = [each for each in found.refused if "zero 3" in each.why and each.layout is None]
    assert refused
    assert all(each.grid.pp > 1 for each in refused)
    both = plan(sketch(), 64, cluster(8), options=Options(zero=(3, 1)))
    piped = [each.layout.zero for each in both.estimates if each.layout.grid.pp > 1]
    assert piped
    assert 3 not in piped


def test_a_plan_needs_rows_and_ranks():
    with pytest.raises(InvalidArgumentError, match="needs rows and ranks, not 0 rows, 2 ranks"):
        plan(sketch(), 0, cluster(2))


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_what_is_alive_is_what_the_checked_schedule_keeps(name, chunks):
    for ranks in (1, 2, 3, 4, 6):
        for micro_batches in (1, 2, 3, ranks, ranks + 1, 2 * ranks, 13, 6 * ranks + 2):
            layout = Layout(
                Grid(pp=ranks), schedule=name, chunks=chunks, micro_batches=micro_batches
            )
            built = schedule_of(layout)
            assert stages_of(name, ranks, chunks) == built.stages
            peaks = tuple(
                max(sum(each.whole) + sum(each.halves) for each in alive(layout, rank))
                for rank in range(ranks)
            )
            assert peaks == check(built).peak_live, layout


def test_zero_divides_what_it_says():
    known = sketch()
    whole, first, second, third = (
        memory(known, Layout(Grid(dp=4), zero=zero, micro_batches=2))[0] for zero in range(4)
    )
    elements = known.elements
    share = -(-elements // 4)
    assert (whole.parameters, whole.gradients) == (4 * elements, 4 * elements)
    assert whole.optimizer == 8 * elements + 4 * 19
    assert (first.parameters, first.gradients) == (4 * elements, 4 * elements)  # no shards so far
    assert (second.gradients, third.parameters) == (4 * share, 4 * share)
    assert third.optimizer == 8 * share + 4 * 19
    assert first.optimizer == second.optimizer == 8 * share + 4 * 5
    assert first.activations == whole.activations
    assert second.activations < whole.activations  # some are gone when buckets are on their way
    wide = memory(known, Layout(Grid(dp=4)), Optimizer(sum_item=8))[0]
    assert wide.gradients == 12 * elements


def test_sixteen_bits_have_masters_only_where_the_state_is_shared():
    known = sketch()
    kinds = tuple(
        replace(kind, parameters=tuple(replace(p, item=2) for p in kind.parameters))
        for kind in known.cuts[Cut()]
    )
    half = replace(known, cuts={Cut(): kinds})
    elements, share = known.elements, -(-known.elements // 4)
    plain, shared = (memory(half, Layout(Grid(dp=4), zero=zero))[0] for zero in (0, 1))
    assert plain.optimizer == 4 * elements + 4 * 19
    assert shared.optimizer == 12 * share + 4 * 5


def test_activations_are_those_of_micro_batches_under_way():
    known = sketch()
    layout = Layout(Grid(pp=2), micro_rows=3, micro_batches=8)
    layers, hand = 4 * (8 + 3000), 3 * 40
    first, last = memory(known, layout)
    assert first.activations == 2 * (150 + layers + 5)
    assert last.activations == layers + 5 + 600
    assert IN_FLIGHT == building.IN_FLIGHT
    assert first.buffers == 9 * hand  # eight that were sent latest, and one that comes
    full = memory(known, replace(layout, recompute="full"))
    assert [each.activations for each in full] == [2 * (150 + 4 * hand + 5), 4 * hand + 605]
    assert full[0].working == 90 + 8 + 3 * 960  # what it keeps but for its input, which is kept
    gone = memory(known, replace(layout, recompute="offload"))
    assert [each.activations for each in gone] == [2 * 150, 600]


def test_gradients_that_no_ranks_sum_come_with_the_first_backward():
    known = sketch()
    before, behind = (memory(known, Layout(Grid(), micro_batches=n))[0] for n in (1, 2))
    whole = 4 * known.elements
    assert (before.activations > 0, before.gradients) in ((True, 0), (False, whole))
    assert behind.gradients in (0, whole)
    small = replace(known, cuts={Cut(): tuple(
        replace(kind, kept=Affine(), shared=Affine()) for kind in known.cuts[Cut()]
    )})  # fmt: skip
    assert memory(small, Layout(Grid()))[0].gradients == whole


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_the_peak_of_a_layout_is_that_of_its_fullest_rank(tied, dp):
    description = sketch(layers=11, tied=tied)
    known = Known(description)
    rest = cycle(product((1, 3, 8, 20), (1, 2)))
    for (name, chunks), zero, recompute in product(
        SCHEDULES, range(3), ("none", "full", "offload")
    ):
        batches, tp = next(rest)
        layout = Layout(
            Grid(tp=tp, pp=2 if chunks > 2 else 4, dp=dp), zero=zero, recompute=recompute,
            schedule=name, chunks=chunks, micro_rows=2, micro_batches=batches,
        )  # fmt: skip
        held = memory(description, layout)
        assert peak(known, layout) == pytest.approx(max(e.total for e in held), rel=0.03), layout
        assert memory(description, layout, known=known) == held


def test_an_estimate_is_that_of_its_layout_and_travels():
    known = sketch()
    best = plan(known, 24, cluster(16)).best()
    assert best.memory == memory(known, best.layout)
    assert best.peak == max(each.total for each in best.memory)
    again = pickle.loads(pickle.dumps(best))
    assert again == best
    assert type(again.memory) is tuple


def test_what_is_refused_needs_what_it_says():
    description = sketch(layers=11)
    known = Known(description)
    options = Options(schedules=(("1f1b", 1), ("interleaved_1f1b", 2)), zero=(1, 2))
    large = [each for each in plan(description, 64, cluster(8, 6_000), options=options).refused
             if each.layout]  # fmt: skip
    assert large
    for each in large:
        found = peak(known, each.layout)
        assert found > 6_000
        told = float(re.match(r"needs (\S+) KiB", each.why)[1])
        assert 2**10 * told == pytest.approx(found, rel=0.005)

"""Memory of layouts in closed form, of models made by hand and of schedules as data."""

from dataclasses import replace
from itertools import cycle, product

import pytest
from plan_sketches import TRAINING, sketch

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.parallel.pg_manager import Grid
from scaletorch.parallel.pipeline_parallel import building, check
from scaletorch.plan import Affine, Cut, Layout, Optimizer
from scaletorch.plan.facts import Facts, alive, contents, schedule_of, stages_of
from scaletorch.plan.memory import IN_FLIGHT, memory, peak

SCHEDULES = [*TRAINING, ("interleaved_1f1b", 1), ("interleaved_1f1b", 3), ("looped_bfs", 3)]


def without_activations(known):
    kinds = (replace(kind, kept=Affine(), shared=Affine()) for kind in known.cuts[Cut()])
    return replace(known, cuts={Cut(): tuple(kinds)})


def test_blocks_lie_on_stages_as_the_pipeline_spreads_them():
    found = [rank.chunks for rank in contents(sketch(), "interleaved_1f1b", 3, 2)]  # (kind, number)
    first, second, third = (
        (((0, 1), (1, 2)), ((1, 1),)),
        (((1, 2),), ((1, 1),)),
        (((1, 1),), ((1, 1), (2, 1))),
    )
    assert found == [first, second, third]
    for wrong, message in {
        ("interleaved_1f1b", 6, 2): "8 layers are fewer than 12 stages",
        ("zb_v", 2, 1): "zb_v has 2 chunks",
        ("forward_only", 2, 1): "'forward_only' is not one of afab",
    }.items():
        with pytest.raises(InvalidArgumentError, match=message):
            contents(sketch(), *wrong)


@pytest.mark.parametrize("tied", [False, True])
def test_ranks_together_hold_the_whole_model(tied):
    known = sketch(tied=tied)
    assert known.elements == 300 + 8 * 111 + 10 + (0 if tied else 300)
    for (name, chunks), pp in product(SCHEDULES, (2, 4)):
        if pp * chunks <= 8:
            layout = Layout(Grid(pp=pp), schedule=name, chunks=chunks, micro_batches=2)
            held = sum(each.parameters for each in memory(known, layout))
            twice = tied and name not in ("zb_v", "dualpipe_v")
            assert held == 4 * known.elements + 1200 * twice, layout


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
    known = sketch(cps=(1,), tps=(1,))
    half = replace(known, cuts={Cut(): tuple(
        replace(kind, parameters=tuple(replace(p, item=2) for p in kind.parameters))
        for kind in known.cuts[Cut()]
    )})  # fmt: skip
    plain, shared = (memory(half, Layout(Grid(dp=4), zero=zero))[0] for zero in (0, 1))
    assert plain.optimizer == 4 * known.elements + 4 * 19
    assert shared.optimizer == 12 * -(-known.elements // 4) + 4 * 5


@pytest.mark.parametrize("zero", [1, 2])
def test_sums_of_16_bits_come_whole_on_every_backend(zero):
    """A rank takes all that others send of them; of float32 a native backend gives it its shard."""
    known, layout = without_activations(sketch()), Layout(Grid(dp=4), zero=zero)
    totals = {
        each: memory(known, layout, Optimizer(sum_item=each[0], native=each[1]))[0].total
        for each in product((2, 4), (True, False))
    }
    assert totals[2, True] == totals[2, False]
    assert totals[4, True] < totals[4, False]


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
    with pytest.raises(InvalidArgumentError, match="sketch is not described with selective"):
        memory(known, Layout(Grid(), recompute="selective"))


def test_gradients_that_no_ranks_sum_come_with_the_first_backward():
    known = sketch()
    before, behind = (memory(known, Layout(Grid(), micro_batches=n))[0] for n in (1, 2))
    whole = 4 * known.elements
    assert (before.activations > 0, before.gradients) in ((True, 0), (False, whole))
    assert behind.gradients in (0, whole)
    assert memory(without_activations(known), Layout(Grid()))[0].gradients == whole


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_the_peak_of_a_layout_is_that_of_its_fullest_rank(tied, dp):
    description = sketch(layers=11, tied=tied)
    known = Facts(description)
    rest = cycle(product((1, 3, 8, 20), (1, 2)))
    for (name, chunks), zero, recompute in product(SCHEDULES, range(3), ("none", "full")):
        batches, tp = next(rest)
        layout = Layout(
            Grid(tp=tp, pp=2 if chunks > 2 else 4, dp=dp), zero=zero, recompute=recompute,
            schedule=name, chunks=chunks, micro_rows=2, micro_batches=batches,
        )  # fmt: skip
        held = memory(description, layout)
        assert peak(known, layout) == pytest.approx(max(e.total for e in held), rel=0.03), layout
        assert memory(description, layout, facts=known) == held

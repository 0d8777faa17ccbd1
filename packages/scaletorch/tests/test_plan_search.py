"""A search finds what one that works out every layout finds, and says why others are refused."""

import pickle
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
from plan_sketches import TRAINING, cluster, sketch

from scaletorch.dist.devices import entry_of_backend
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.parallel.pg_manager import Grid, count_communicators, legal_layouts
from scaletorch.plan import Layout, Options, cluster_named, plan, time
from scaletorch.plan.facts import Facts
from scaletorch.plan.memory import memory, peak
from scaletorch.plan.search import legal
from scaletorch.plan.timing import Steps

MANY = Options(zero=(0, 1, 2), schedules=tuple(TRAINING), micro_rows=(1, 2, 3))
UNEVEN = sketch(9, tps=(1, 2), cps=(1,))


@pytest.fixture(scope="module")
def whole():
    return plan(UNEVEN, 24, cluster(8), options=MANY)


def test_every_grid_is_planned_or_refused_with_a_reason():
    known = sketch()
    found = plan(known, 24, cluster(16))
    grids = {each.layout.grid for each in found.estimates} | {each.grid for each in found.refused}
    assert grids == {*legal_layouts(16)}
    assert all(each.layout.grid.world_size == 16 for each in found.estimates)
    assert {each.why for each in found.refused} >= {
        "24 rows are no multiple of dp 16 x 1 rows of a micro-batch",
        "8 layers are fewer than pp 16 x 1 chunks: each stage needs one",
        "sketch is not described for tp 16, cp 1",
    }
    best = found.best()
    assert best == found.estimates[0] == pickle.loads(pickle.dumps(best))
    assert best.memory == memory(known, best.layout)
    assert best.peak == max(each.total for each in best.memory)
    with pytest.raises(InvalidArgumentError, match="must be at least 1, got 0 and 2"):
        plan(known, 0, cluster(2))


def test_sizes_restrict_a_search_to_what_it_would_find_of_them(whole):
    some = plan(UNEVEN, 24, cluster(8), options=replace(MANY, sizes={"pp": (2, 4)}))
    meant = [each for each in whole.estimates if each.layout.grid.pp in (2, 4)]
    assert list(some.estimates) == meant
    assert 0 < len(meant) < len(whole.estimates)
    assert list(some.refused) == [each for each in whole.refused if each.grid.pp in (2, 4)]


def test_layouts_are_ranked_as_if_the_times_of_all_were_known(whole):
    assert len(whole.estimates) > 50
    steps = [each.time.step for each in whole.estimates]
    assert steps == sorted(time(UNEVEN, each.layout, cluster(8)).step for each in whole.estimates)


def each_by_its_peak(known, room):
    """Return what fits with the least savings of memory, and what does not with any of them."""
    holdings = Facts(known)
    fitting, refused = [], []
    for layout in legal(known, 24, 8, MANY)[0]:
        steps = []
        zeros = MANY.zero if layout.grid.cp * layout.grid.dp > 1 else (0,)
        ladder = product(enumerate(MANY.recompute), enumerate(zeros))
        for taken in sorted(ladder, key=lambda pair: (pair[0][0] + pair[1][0], pair)):
            (first, recompute), (second, zero) = taken
            own = replace(layout, recompute=recompute, zero=zero)
            enough = any(a <= first and b <= second for a, b in steps)
            if not enough and peak(holdings, own) <= room:
                steps.append((first, second))
                fitting.append(own)
        if not steps:
            refused.append(replace(layout, recompute="none", zero=0))
    return fitting, refused


def test_just_what_fits_is_found(whole):
    peaks = sorted(each.peak for each in whole.estimates)
    for room in (10_000, *peaks[1 :: len(peaks) // 4]):
        fitting, refused = each_by_its_peak(UNEVEN, room)
        found = plan(UNEVEN, 24, cluster(8, room), options=MANY)
        assert {each.layout for each in found.estimates} == {*fitting}
        assert len(found.estimates) == len(fitting)
        own = [each for each in found.refused if each.layout is not None]
        assert {replace(each.layout, recompute="none", zero=0) for each in own} == {*refused}
        assert len(own) == len(refused)
        if not fitting:
            nearest = [each.peak for each in found.top(len(own) + 1)]
            assert room < nearest[0]
            assert nearest == sorted(nearest)
            assert len(nearest) == len(own)
        words = r"does not fit in .* KiB, even with zero \d and recompute full"
        assert all(re.fullmatch(words, each.why) for each in own)
    with pytest.raises(InvalidArgumentError, match="no layout of 8 ranks can train sketch: TP"):
        plan(UNEVEN, 24, cluster(8, 100)).best()


def test_zero_3_has_no_pipeline():
    for zero in ((3,), (3, 1)):
        found = plan(sketch(), 64, cluster(8), options=Options(zero=zero))
        layouts = [each.layout for each in found.estimates]
        assert any(layout.zero == 3 for layout in layouts)
        assert all(layout.grid.pp == 1 for layout in layouts if layout.zero == 3)
        refused = {each.grid.pp > 1 for each in found.refused if "zero 3" in each.why}
        assert refused == ({True} if zero == (3,) else set())


def test_communicators_are_part_of_a_ranks_memory():
    """Each distinct group of a layout holds memory, which the fewest groups leave to the model."""
    group = entry_of_backend("nccl").group_memory
    assert cluster_named("A100-SXM-80GB", 1).device.group_memory == group
    plain = plan(UNEVEN, 24, cluster(8, 2**40))
    held = plan(UNEVEN, 24, cluster(8, 2**40, group_memory=group))
    assert {each.layout for each in held.estimates} == {each.layout for each in plain.estimates}
    assert {each.communicators for each in plain.estimates} == {0}
    for each in held.estimates:
        assert each.communicators == group * count_communicators(each.layout.grid)
        assert each.peak == each.memory[each.fullest].total + each.communicators
    tight = plan(UNEVEN, 24, cluster(8, 2 * group, group_memory=group))  # room for one, not three
    assert {count_communicators(each.layout.grid) for each in tight.estimates} == {1}


def test_a_step_takes_what_it_takes_at_the_least_or_more():
    steps = Steps(UNEVEN, cluster(8))
    for (name, chunks), pp, batches in product(TRAINING, (1, 2, 4), (1, 3, 8, 40)):
        layout = Layout(
            Grid(pp=pp, dp=8 // pp), schedule=name, chunks=chunks, micro_batches=batches
        )
        assert 0 < steps.least(layout) <= steps.exact(layout).step, layout


def test_a_search_imports_no_torch():
    program = "import sys, scaletorch.plan.search; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)

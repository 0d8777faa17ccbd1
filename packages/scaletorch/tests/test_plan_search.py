"""A search that works out little of layouts that are not looked at finds what one of all finds."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest

from scaletorch.dist.devices import entry_of_backend
from scaletorch.parallel.pg_manager import Grid, count_communicators
from scaletorch.parallel.pipeline_parallel import SCHEDULES
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
    Refused,
    Sent,
    Work,
    cluster_named,
    legal,
    plan,
    time,
)
from scaletorch.plan.known import Known
from scaletorch.plan.memory import memory, peak
from scaletorch.plan.options import ladder
from scaletorch.plan.timing import Steps

CHUNKS = {"interleaved_1f1b": 2, "looped_bfs": 2, "zb_v": 2, "dualpipe_v": 2}
TRAINING = [name for name in SCHEDULES if name != "forward_only"]
MANY = Options(
    recompute=("none", "full"), zero=(0, 1, 2),
    schedules=tuple((name, CHUNKS.get(name, 1)) for name in TRAINING), micro_rows=(1, 2, 3),
)  # fmt: skip


def block(flops: float, share: int) -> Behaviour:
    return Behaviour(
        (Parameter("w", 1200, 4, 1200 // share),),
        kept=Affine(8, 1000), handed=Affine(0, 4000), entered=Affine(0, 40),
        sent=(Sent("tp", "all_reduce", "forward", 2, Affine(0, 900)),) * (share > 1),
        work=(Work("matmul", 2, Affine(0, flops / share), Affine()),),
    )  # fmt: skip


def model(layers: int = 9) -> Description:
    """Return layers between a quick block and one that takes as long as four of them."""
    blocks = (
        Block("embed", 0, "first"),
        *(Block(f"layers.{at}", 1, "layer") for at in range(layers)),
        Block("head", 2, "last"),
    )
    cuts = {Cut(tp): tuple(block(flops, tp) for flops in (1e5, 1e6, 4e6)) for tp in (1, 2)}
    return Description("uneven", 8, "float32", blocks, cuts)


def cluster(ranks: int, memory: int = 2**20) -> Cluster:
    device = Device("toy", memory, {"float32": 1e9}, 1e9, overhead=1e-5)
    return Cluster(ranks, device, (Link(ranks, 1e-5, 1e8),))


def test_sizes_restrict_a_search_to_what_it_would_find_of_them() -> None:
    known = model()
    whole = plan(known, 24, cluster(8), options=MANY)
    some = plan(known, 24, cluster(8), options=replace(MANY, sizes={"pp": (2, 4)}))
    meant = [each for each in whole.estimates if each.layout.grid.pp in (2, 4)]
    assert list(some.estimates) == meant
    assert 0 < len(meant) < len(whole.estimates)
    refused = [each for each in whole.refused if each.grid.pp in (2, 4)]
    assert list(some.refused) == refused


def each_by_its_peak(known: Description, room: int) -> tuple[list[Layout], list[Layout]]:
    """What fits, with the least of what saves memory; and what does not with any of it."""
    holdings = Known(known)
    fitting: list[Layout] = []
    refused: list[Layout] = []
    for layout in legal(known, 24, 8, MANY):
        if isinstance(layout, Refused):
            continue
        steps: list[tuple[int, int]] = []
        for taken, own in ladder(layout, MANY):
            enough = any(a <= taken[0] and b <= taken[1] for a, b in steps)
            if not enough and peak(holdings, own) <= room:
                steps.append(taken)
                fitting.append(own)
        if not steps:
            refused.append(replace(layout, recompute="none", zero=0))
    return fitting, refused


def test_what_takes_too_much_comes_with_the_least_first() -> None:
    known = model()
    found = plan(known, 24, cluster(8, 12_000), options=MANY)
    peaks = [each.peak for each in found.over]
    assert peaks == sorted(peaks)
    assert {peak > 12_000 for peak in peaks} == {True}
    assert all(each.time == time(known, each.layout, cluster(8)) for each in found.over)
    named = [each.layout for each in found.refused if each.layout is not None]
    assert {each.layout for each in found.over} == {*named}
    assert len(named) == len(found.over) > 10


def test_communicators_are_part_of_a_ranks_memory() -> None:
    """Each distinct group of a layout holds memory, which the fewest groups leave to the model."""
    nccl = entry_of_backend("nccl")
    assert nccl is not None
    assert cluster_named("A100-SXM-80GB", 1).device.group_memory == nccl.group_memory
    plain = plan(model(), 24, cluster(8, 2**30))
    device = replace(cluster(8, 2**30).device, group_memory=2**26)
    held = plan(model(), 24, replace(cluster(8, 2**30), device=device))
    assert {each.layout for each in held.estimates} == {each.layout for each in plain.estimates}
    assert {each.communicators for each in plain.estimates} == {0}
    for each in held.estimates:
        assert each.communicators == 2**26 * count_communicators(each.layout.grid)
        assert each.peak == each.memory[each.fullest].total + each.communicators
    tight = replace(device, memory=2 * 2**26)  # room for one group, and not for three
    few = plan(model(), 24, replace(cluster(8, 2**30), device=tight))
    assert {count_communicators(each.layout.grid) for each in few.estimates} == {1}
    assert min(each.peak for each in few.over) > 2 * 2**26


@pytest.mark.parametrize("zero", [1, 2])
def test_sums_of_16_bits_come_whole_on_every_backend(zero: int) -> None:
    """A rank takes all that others send of them; of float32 a native backend gives it its shard."""
    layout = Layout(Grid(dp=4), zero=zero, micro_batches=2)
    totals = {}
    for item, native in product((2, 4), (True, False)):
        known = Known(model(), Optimizer(sum_item=item, native=native))
        (held,) = memory(known.description, layout, known=known)
        totals[item, native] = held.total
        assert peak(known, layout) == held.total
    assert totals[2, True] == totals[2, False]
    assert totals[4, True] < totals[4, False]


def test_layouts_are_ranked_as_if_the_times_of_all_were_known() -> None:
    known = model()
    found = plan(known, 24, cluster(8), options=MANY)
    assert len(found.estimates) == len(found.fitting) > 50
    steps = [each.time.step for each in found.estimates]
    assert steps == sorted(time(known, layout, cluster(8)).step for layout in found.fitting)
    assert found.best() == found.estimates[0]


def test_just_what_fits_is_found() -> None:
    known, machines = model(), cluster(8)
    peaks = sorted(each.peak for each in plan(known, 24, machines, options=MANY).estimates)
    for place in range(1, len(peaks), len(peaks) // 4):
        room = peaks[place]
        fitting, refused = each_by_its_peak(known, room)
        found = plan(known, 24, cluster(8, room), options=MANY)
        assert {each.layout for each in found.estimates} == {*fitting}
        assert len(found.estimates) == len(fitting)
        own = [each.layout for each in found.refused if each.layout is not None]
        assert {replace(each, recompute="none", zero=0) for each in own} == {*refused}
        assert len(own) == len(found.over) == len(refused)


def test_a_step_takes_what_it_takes_at_the_least_or_more() -> None:
    steps = Steps(model(), cluster(8))
    for (name, pp), batches in product(product(TRAINING, (1, 2, 4)), (1, 3, 8, 40)):
        chunks = CHUNKS.get(name, 1)
        layout = Layout(
            Grid(pp=pp, dp=8 // pp), schedule=name, chunks=chunks, micro_batches=batches
        )
        assert 0 < steps.least(layout) <= steps.exact(layout).step, layout


def test_a_search_imports_no_torch() -> None:
    program = "import sys, scaletorch.plan.search; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)

"""A search that works out little of layouts that are not looked at finds what one of all finds."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

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
    search,
    time,
)
from scaletorch.plan.__main__ import main
from scaletorch.plan.clusters import device_named, write_cluster
from scaletorch.plan.holding import Holdings
from scaletorch.plan.later import Later
from scaletorch.plan.memory import peak, ranks_hold
from scaletorch.plan.options import ladder
from scaletorch.plan.search import Timer
from scaletorch.plan.timing import step, timers
from scaletorch.plan.written import write

CHUNKS = {"interleaved_1f1b": 2, "looped_bfs": 2, "zb_v": 2, "dualpipe_v": 2}
TRAINING = [name for name in SCHEDULES if name != "forward_only"]
MANY = Options(
    recompute=("none", "full"), zero=(0, 1, 2),
    schedules=tuple((name, CHUNKS.get(name, 1)) for name in TRAINING), micro_rows=(1, 2, 3),
)  # fmt: skip


def block(flops: float, share: int) -> Behaviour:
    return Behaviour(
        (Parameter("w", 1200, 4, (1200 // share,) * share),),
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


def cluster(ranks: int, memory: int = 2**20, cores: int = 0) -> Cluster:
    device = Device("toy", memory, {"float32": 1e9}, 1e9, overhead=1e-5)
    return Cluster(ranks, device, (Link(ranks, 1e-5, 1e8),), cores)


@pytest.mark.parametrize("cores", [0, 3])
def test_a_step_takes_what_it_takes_at_the_least_or_more(cores: int) -> None:
    """Uneven stages, simulated and in closed form, and ranks that share cores."""
    exact, least = timers(model(), cluster(8, cores=cores))
    nearest = 0.0
    for (name, pp), batches, tp in product(
        product(TRAINING, (1, 2, 4)), (1, 2, 3, 5, 8, 40, 100), (1, 2)
    ):
        chunks = CHUNKS.get(name, 1)
        layout = Layout(
            Grid(pp=pp, tp=tp, dp=8 // pp // tp), schedule=name, chunks=chunks,
            micro_batches=batches,
        )  # fmt: skip
        share = least(layout) / exact(layout).step
        assert 0 < share <= 1, layout
        nearest = max(nearest, share)
    assert nearest > 0.99


def test_layouts_are_ranked_as_if_the_times_of_all_were_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, timed = model(), []
    peaks = sorted(each.peak for each in plan(known, 24, cluster(8), options=MANY).estimates)
    machines = cluster(8, peaks[len(peaks) // 2])  # some need what saves memory
    whole = plan(known, 24, machines, options=MANY, time=lambda *given: time(*given))
    number = len(whole.estimates)
    plain = step._time

    def counted(*given):  # type: ignore[no-untyped-def]
        timed.append(given[1])
        return plain(*given)

    monkeypatch.setattr(step, "_time", counted)
    found = plan(known, 24, machines, options=MANY, time=time)
    assert 0 < len(timed) < number / 2
    assert found.best() == whole.best()
    few = len(timed)
    assert found.estimates[:3] == whole.estimates[:3]
    assert few <= len(timed) < number / 2
    assert found.refused == whole.refused != ()
    assert found.estimates == whole.estimates
    keys = [(each.time.step, each.peak) for each in found.estimates if each.time]
    assert keys == sorted(keys)
    assert len(keys) == len(found.estimates) == number > 50
    assert number <= len(timed) == len({*timed})


def test_sizes_restrict_a_search_to_what_it_would_find_of_them() -> None:
    known = model()
    whole = plan(known, 24, cluster(8), options=MANY, time=time)
    some = plan(known, 24, cluster(8), options=replace(MANY, sizes={"pp": (2, 4)}), time=time)
    meant = [each for each in whole.estimates if each.layout.grid.pp in (2, 4)]
    assert tuple(some.estimates) == tuple(meant)
    assert 0 < len(meant) < len(whole.estimates)
    refused = [each for each in whole.refused if each.grid.pp in (2, 4)]
    assert some.refused == tuple(refused)


@pytest.mark.parametrize("timer", [None, time])
def test_just_what_fits_is_found(timer: Timer | None) -> None:
    known, machines, seen = model(), cluster(8), Counter[str]()
    peaks = sorted(each.peak for each in plan(known, 24, machines, options=MANY).estimates)
    for place in range(1, len(peaks), len(peaks) // 8):
        room = peaks[place]
        fitting, refused = each_by_its_peak(known, room)
        found = plan(known, 24, cluster(8, room), options=MANY, time=timer)
        never = sum(each.layout is None for each in found.refused)
        late = len(refused) + never - found.sure.refused
        assert 0 <= late <= found.sure.open
        assert found.sure.fit <= len(fitting)
        assert {each.layout for each in found.estimates} == {*fitting}
        assert len(found.estimates) == len(fitting)
        own = [each.layout for each in found.refused if each.layout is not None]
        assert {replace(each, recompute="none", zero=0) for each in own} == {*refused}
        assert len(own) == len(found.over) == len(refused)
        seen += Counter(late=late, fit=found.sure.open - late)
    assert seen["late"] > 0 < seen["fit"]


def each_by_its_peak(known: Description, room: int) -> tuple[list[Layout], list[Layout]]:
    """What fits, with the least of what saves memory; and what does not with any of it."""
    holdings = Holdings(known)
    fitting: list[Layout] = []
    refused: list[Layout] = []
    for layout in legal(known, 24, 8, MANY):
        if isinstance(layout, Refused):
            continue
        steps: list[tuple[int, int]] = []
        for taken, recompute, zero in ladder(layout, MANY, steps):
            own = layout.saving(recompute, zero)
            if peak(holdings, own) <= room:
                steps.append(taken)
                fitting.append(own)
        if not steps:
            refused.append(replace(layout, recompute="none", zero=0))
    return fitting, refused


def test_what_takes_too_much_comes_with_the_least_first() -> None:
    known = model()
    found = plan(known, 24, cluster(8, 12_000), options=MANY, time=time)
    peaks = [each.peak for each in found.over]
    assert peaks == sorted(peaks)
    assert {peak > 12_000 for peak in peaks} == {True}
    assert all(each.time == time(known, each.layout, cluster(8)) for each in found.over)
    named = [each.layout for each in found.refused if each.layout is not None]
    assert {each.layout for each in found.over} == {*named}
    assert len(named) == len(found.over) > 10


def test_a_table_looks_at_no_more_layouts_than_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(model(), tmp_path / "model.json")
    looked = []
    plain = search.ranks_hold

    def counted(*given):  # type: ignore[no-untyped-def]
        looked.append(given[1])
        return plain(*given)

    monkeypatch.setattr(search, "ranks_hold", counted)
    given = ["--description", str(tmp_path / "model.json"), "--rows", "24", "--ranks", "8"]
    for more, status, most in (
        (["--top", "3"], 0, 3), (["--top", "3", "--memory", "12KiB"], 1, 3),
        (["--explain", "2x2x1x2"], 0, 1),
    ):  # fmt: skip
        looked.clear()
        assert main([*given, *more]) == status
        assert 0 < len(looked) <= most
    assert "fits in" in capsys.readouterr().out
    whole = plan(model(), 24, cluster(8, 90 * 2**10))
    fitting = {each.layout.grid for each in whole.estimates}
    assert fitting
    (grid, *_) = (each.layout.grid for each in whole.over if each.layout.grid not in fitting)
    more = ["--memory", "90KiB", "--json", str(tmp_path / "plan.json"), "--explain"]
    main([*given, *more, f"{grid.dp}x{grid.pp}x{grid.cp}x{grid.tp}"])
    assert "does not fit in" in capsys.readouterr().out


def test_a_table_counts_what_bounds_tell_and_a_file_what_peaks_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(model(), tmp_path / "model.json")
    given = ["--description", str(tmp_path / "model.json"), "--rows", "24", "--ranks", "8"]
    device = replace(device_named("A100-SXM-80GB"), memory=78 * 2**10, group_memory=0)
    nodes = replace(cluster_named("dgx-a100", 8), device=device)
    write_cluster(nodes, tmp_path / "small.json")
    given += ["--cluster", str(tmp_path / "small.json")]
    assert main([*given, "--top", "1"]) == 0
    assert "1 layouts fit at the least, 8 others may; 58 do not" in capsys.readouterr().out
    for more in (["--top", "1", "--json", str(tmp_path / "plan.json")], ["--top", "3"]):
        assert main([*given, *more]) == 0
        assert "\n2 layouts fit; 64 do not" in capsys.readouterr().out
    written = json.loads((tmp_path / "plan.json").read_text())
    assert (len(written["estimates"]), len(written["refused"])) == (2, 64)
    assert all(each["peak"] <= 78 * 2**10 for each in written["estimates"])


def test_only_what_is_looked_at_is_made() -> None:
    made: list[int] = []

    def squares():  # type: ignore[no-untyped-def]
        for at in range(6):
            made.append(at)
            yield at * at

    later = Later(squares(), 6)
    assert (len(later), made) == (6, [])
    assert later[1] == 1
    assert made == [0, 1]
    assert later[:3] == (0, 1, 4)
    assert made == [0, 1, 2]
    assert (later[3:3], bool(later), made) == ((), True, [0, 1, 2])
    assert later[4] == 16
    assert made == [0, 1, 2, 3, 4]
    assert (later[4:2:-1], later[-2], later[-3:]) == ((16, 9), 16, (9, 16, 25))
    with pytest.raises(IndexError):
        later[6]
    whole = (0, 1, 4, 9, 16, 25)
    assert tuple(later) == whole
    assert later == whole == pickle.loads(pickle.dumps(later))
    assert later == Later(iter(whole)) != Later(iter(whole[:2]))
    assert (len(Later(iter(whole))), bool(Later(()))) == (6, False)
    assert (repr(later), hash(later), later[::-2]) == (repr(whole), hash(whole), whole[::-2])


def test_Peaks_all_cuts_at_once_are_those_of_each_alone() -> None:
    known, machines = model(), cluster(8)
    for each in plan(known, 24, machines, options=MANY).estimates:
        alone = replace(known, cuts={each.layout.cut: known.cuts[each.layout.cut]})
        sizes = {tuple(own.total for own in each.memory)}
        options = replace(
            MANY, recompute=(each.layout.recompute,), zero=(each.layout.zero,),
            schedules=((each.layout.schedule, each.layout.chunks),),
            micro_rows=(each.layout.micro_rows,),
        )  # fmt: skip
        again = plan(alone, 24, machines, options=options).estimates
        assert {
            tuple(own.total for own in e.memory) for e in again if e.layout == each.layout
        } == sizes


def test_communicators_are_part_of_a_ranks_memory() -> None:
    """Each distinct group of a layout holds memory, which the fewest groups leave to the model."""
    nccl = entry_of_backend("nccl")
    assert nccl is not None
    assert device_named("A100-SXM-80GB").group_memory == nccl.group_memory
    plain = plan(model(), 24, cluster(8, 2**30))
    device = replace(cluster(8, 2**30).device, group_memory=2**26)
    held = plan(model(), 24, replace(cluster(8, 2**30), device=device))
    assert {each.layout for each in held.estimates} == {each.layout for each in plain.estimates}
    assert {each.communicators for each in plain.estimates} == {0}
    for each in held.estimates:
        assert each.communicators == 2**26 * count_communicators(each.layout.grid)
        assert each.peak == each.memory[each.fullest].total + each.communicators
        assert each.as_json()["communicators"] == each.communicators
    peaks = [each.peak for each in held.estimates]
    assert peaks == sorted(peaks)
    assert held.best().layout.grid.dp == 8  # one group
    tight = replace(device, memory=2 * 2**26)  # room for one group, and not for three
    few = plan(model(), 24, replace(cluster(8, 2**30), device=tight))
    assert {count_communicators(each.layout.grid) for each in few.estimates} == {1}
    assert any("before a step" in each.why for each in few.refused)
    assert min(each.peak for each in few.over) > 2 * 2**26


@pytest.mark.parametrize("zero", [1, 2])
def test_sums_of_16_bits_come_whole_on_every_backend(zero: int) -> None:
    """A rank takes all that others send of them; of float32 a native backend gives it its shard."""
    layout = Layout(Grid(dp=4), zero=zero, micro_batches=2)
    totals = {}
    for item, native in product((2, 4), (True, False)):
        known = Holdings(model(), Optimizer(sum_item=item, native=native))
        (held,) = ranks_hold(known, layout)
        totals[item, native] = held.total
        assert peak(known, layout) == held.total
    assert totals[2, True] == totals[2, False]
    assert totals[4, True] < totals[4, False]

"""Seconds of a step against sums done by hand, real schedules, and files of clusters."""

import json
from dataclasses import replace
from functools import partial

import pytest
from plan_sketches import TRAINING, model

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.parallel.pg_manager import Grid
from scaletorch.parallel.pipeline_parallel import Costs, simulate
from scaletorch.plan import (
    DEVICES,
    Affine,
    Behaviour,
    Cluster,
    Cut,
    Device,
    Layout,
    Link,
    Parameter,
    Sent,
    Work,
    cluster_named,
    read_cluster,
    time,
    write_cluster,
)
from scaletorch.plan.costs import route, seconds
from scaletorch.plan.estimate import bytes_in
from scaletorch.plan.facts import schedule_of

DEVICE = Device("toy", 2**30, {"float32": 1e9}, 1e9)
EIGHT = Cluster(8, DEVICE, (Link(8, 1e-3, 1e6),))


def products(flops, *sent, elements=0):
    """Return a block of one product a row, 4 bytes handed on."""
    parameters = (Parameter("w", elements, 4, elements),) if elements else ()
    forward = Work("matmul", 1, Affine(0, flops), Affine())
    work = (forward, Work("matmul", 2, Affine(0, 2 * flops), Affine(), "backward"))
    return Behaviour(parameters, handed=Affine(0, 4), sent=sent, work=work)


def described(layers, cuts):
    """Return equal layers between two blocks that do nothing."""
    idle = Behaviour(())
    return model({cut: (idle, each, idle) for cut, each in cuts.items()}, layers)


ALONE = described(4, {Cut(): products(1e7)})


def test_one_process_computes_forward_and_twice_as_much_backward():
    found = time(ALONE, Layout(Grid(), micro_rows=2, micro_batches=3), EIGHT)
    assert found.step == pytest.approx(4 * 3 * 2 * (0.01 + 0.02))
    assert found.computing == found.step
    assert found.exposed == found.hidden == {}
    assert found.bubble == 0
    assert found.low == pytest.approx(0.9 * found.step)
    assert found.high == pytest.approx(1.1 * found.step)


def test_a_slow_memory_and_overheads_count():
    work = (Work("matmul", 2, Affine(1e6), Affine(5e6)), Work("other", 3, Affine(), Affine(6e6)))
    device = replace(DEVICE, overhead=1e-3)
    kind = Behaviour((), work=(*work, replace(work[1], phase="backward")))
    found = time(described(1, {Cut(): kind}), Layout(Grid()), Cluster(1, device, ()))
    # Forward as described; backward as described too, since some of it is.
    assert found.step == pytest.approx((5e-3 + 2e-3) + (6e-3 + 3e-3) * 2)


def test_recomputation_runs_forwards_again():
    work = (
        Work("matmul", 1, Affine(1e7), Affine()), Work("attention", 1, Affine(1e7), Affine()),
        Work("matmul", 2, Affine(2e7), Affine(), "backward"),
        Work("attention", 1, Affine(2.5e7), Affine(), "backward"),
    )  # fmt: skip
    some = described(1, {Cut(): Behaviour((), work=work)})
    steps = {
        name: time(some, Layout(Grid(), recompute=name), EIGHT).step for name in ("none", "full")
    }
    assert steps["none"] == pytest.approx(0.01 * (1 + 1 + 2 + 2.5))
    assert steps["full"] - steps["none"] == pytest.approx(0.02)


def test_efficiency_goes_by_size():
    share = {"matmul": ((1e6, 0.3), (1e8, 0.7)), "matmul backward": ((1e6, 0.25),)}
    slower = Cluster(1, replace(DEVICE, efficiency=share), ())
    assert time(ALONE, Layout(Grid()), slower).step == pytest.approx(4 * (0.02 + 0.08))


def test_groups_cross_the_links_of_their_ranks():
    cluster = Cluster(16, DEVICE, (Link(4, 1.0, 100.0), Link(16, 10.0, 10.0)))
    grid = Grid(tp=2, cp=2, pp=2, dp=2)
    # Rings: n - 1 steps of a gather, twice as many of an all-reduce; inside a node two ranks
    # share what goes between nodes.
    assert seconds("all_gather", 1, 40, route(grid, "tp", cluster), cluster) == 1 + 0.4
    assert seconds("all_reduce", 3, 40, route(grid, "pp", cluster), cluster) == 3 * 20 + 4
    both = route(grid, "cp_dp", cluster)
    assert seconds("reduce_scatter", 1, 40, both, cluster) == 1 + 10 + max(40 / 100, 40 / 20)
    assert seconds("send", 1, 40, both, cluster) == 10 + 4
    assert seconds("all_to_all", 1, 30, both, cluster) == 1 + 10 + 10 / 100 + 20 / 10
    assert seconds("all_reduce", 1, 40, route(Grid(), "tp", cluster), cluster) == 0
    # Measured calls stand before the plain figures.
    measured = Cluster(8, DEVICE, (Link(8, 1.0, 1.0, {"all_gather": (2.0, 4.0)}),))
    four = route(Grid(tp=4), "tp", measured)
    assert seconds("all_gather", 1, 8, four, measured) == 3 * 2 + 2
    assert seconds("broadcast", 1, 8, four, measured) == 2 + 8


def test_messages_of_layers_are_waited_for_or_hide():
    cut = Cut(tp=2)
    waits = Sent("tp", "all_gather", "forward", 1, Affine(0, 1000))
    hides = replace(waits, phase="backward", awaited=False)
    description = described(4, {cut: products(1e7, waits, hides)})
    cluster = Cluster(2, DEVICE, (Link(2, 1e-3, 1e6),))
    layout = Layout(Grid(tp=2), micro_batches=5)
    found = time(description, layout, cluster)
    once = 4 * 5 * 2e-3
    assert found.exposed["tp"] == pytest.approx(once)
    assert found.hidden["tp"] == pytest.approx(once)
    control = found.exposed["world"]
    assert control == pytest.approx(2e-3)  # an all-reduce of two steps over all ranks
    assert found.step == pytest.approx(4 * 5 * 0.03 + once + control)
    assert found.high == pytest.approx(found.step + 0.1 * found.computing + once)
    shares = replace(cluster, device=replace(DEVICE, hides=0.25))
    found = time(description, layout, shares)
    assert found.hidden["tp"] == pytest.approx(once / 4)
    assert found.exposed["tp"] == pytest.approx(once * 1.75)


def test_rings_of_attention_hide_behind_attention_alone():
    cut = Cut(cp=2, cp_method="ring")
    sent = Sent("cp", "send", "forward", 1, Affine(5000))
    work = (
        Work("matmul", 1, Affine(1e7), Affine()), Work("attention", 1, Affine(2e6), Affine())
    )  # fmt: skip
    description = described(1, {cut: Behaviour((), sent=(sent,), work=work)})
    cluster = Cluster(2, DEVICE, (Link(2, 1e-3, 1e6),))
    found = time(description, Layout(Grid(cp=2)), cluster)
    assert found.hidden["cp"] == pytest.approx(2e-3)
    assert found.exposed["cp"] == pytest.approx(6e-3 - 2e-3)


def test_gradients_are_summed_behind_the_backward_and_updated():
    description = described(1, {Cut(): products(1e8, elements=2**21)})
    size = 4 * 2**21
    cluster = Cluster(4, DEVICE, (Link(4, 0.0, 1e9),))
    layout = Layout(Grid(dp=4))
    whole = 2 * size * 3 / 4 / 1e9
    found = time(description, layout, cluster)
    assert found.hidden["cp_dp"] == pytest.approx(whole * 7 / 8)  # 8 buckets, the last one late
    assert found.exposed["cp_dp"] == pytest.approx(whole / 8)
    assert found.update == pytest.approx(7 * size / 1e9)
    sharded = time(description, replace(layout, zero=1), cluster)
    assert sharded.update == pytest.approx(found.update / 4)
    assert sharded.exposed["cp_dp"] == pytest.approx(whole / 2 / 8 + whole / 2)
    twice = replace(layout, micro_batches=2, zero=2)
    assert time(description, twice, cluster).hidden["cp_dp"] == pytest.approx(whole / 2 * 7 / 8 * 2)
    gathers = time(description, replace(twice, zero=3), cluster)
    assert gathers.hidden["cp_dp"] == pytest.approx(whole / 2 * 2 * (7 / 8 + 2))


def test_what_is_tied_on_one_rank_is_updated_once():
    cluster = Cluster(2, DEVICE, (Link(2, 0.0, 1e9),))
    outer = Behaviour((Parameter("w", 2**20, 4, 2**20),))
    description = replace(
        described(2, {}), cuts={Cut(): (outer, products(1e7), outer)}, tied=(("0.w", "2.w"),)
    )
    once = 7 * 4 * 2**20 / 1e9
    assert time(description, Layout(Grid()), cluster).update == pytest.approx(once)
    apart = time(description, Layout(Grid(pp=2)), cluster)
    assert apart.update == pytest.approx(once)  # on each of the two ranks
    twice = time(replace(description, tied=()), Layout(Grid()), cluster)
    assert twice.update == pytest.approx(2 * once)


def test_what_is_tied_between_stages_is_summed_between_them():
    """Each of two ranks sends whether it has a gradient, and the gradient: 0.5 s each, and 4 MB."""
    cluster = Cluster(4, DEVICE, (Link(4, 0.5, 1e6),))
    outer = Behaviour((Parameter("v", 10, 4, 10), Parameter("w", 10**6, 4, 10**6)))
    apart = replace(described(4, {}), cuts={Cut(): (outer, products(1e7), outer)})
    tied = replace(apart, tied=(("0.w", "2.w"),))
    for layout, waits in (
        (Layout(Grid(pp=2)), 5.0), (Layout(Grid(pp=4)), 5.0), (Layout(Grid(dp=2)), 0.0),
        (Layout(Grid(pp=2), schedule="zb_v", chunks=2), 0.0),  # one rank has both ends
    ):  # fmt: skip
        one, two = (time(each, layout, cluster) for each in (apart, tied))
        assert two.exposed.get("pp", 0) - one.exposed.get("pp", 0) == pytest.approx(waits)


def test_experts_gradients_go_over_their_own_groups():
    shared = Parameter("w", 2**20, 4, 2**20)
    expert = Parameter("e", 2**20, 4, 2**19, expert=True)
    kind = replace(products(1e8), parameters=(shared, expert))
    cluster = Cluster(4, DEVICE, (Link(4, 0.0, 1e9),))
    found = time(described(1, {Cut(ep=2): kind}), Layout(Grid(dp=4, ep=2)), cluster)
    sent = {axis: found.exposed[axis] + found.hidden[axis] for axis in ("cp_dp", "edp")}
    assert sent["cp_dp"] == pytest.approx(2 * 4 * 2**20 * 3 / 4 / 1e9)
    assert sent["edp"] == pytest.approx(2 * 4 * 2**19 * 1 / 2 / 1e9)


def test_a_pipeline_is_its_schedule_simulated():
    cluster = Cluster(4, DEVICE, (Link(4, 1e-3, 1e6),))
    for name, chunks in TRAINING:
        description, each = described(8, {Cut(): products(1e7)}), 8 / 4 / chunks
        costs = Costs(0.01 * each, 0.02 * each, 0.01 * each, 0.01 * each, 1e-3 + 4e-6)
        for batches in (6, 60):  # simulated as it is, and extrapolated
            layout = Layout(Grid(pp=4), schedule=name, chunks=chunks, micro_batches=batches)
            found = time(description, layout, cluster)
            whole = simulate(schedule_of(layout), costs).makespan
            assert found.step - found.exposed["world"] == pytest.approx(whole, rel=0.01), layout
            free = simulate(schedule_of(layout), replace(costs, message=0.0)).makespan
            assert found.exposed["pp"] == pytest.approx(whole - free, abs=0.01 * whole), layout
            waits = pytest.approx(free - found.computing, abs=0.02 * free)
            assert found.bubble * found.step == waits, layout


def test_sizes_have_units():
    assert bytes_in("80GiB") == 80 * 2**30
    assert bytes_in(" 1.5 GB ") == 1_500_000_000
    assert bytes_in("2e9") == bytes_in("2E9") == 2_000_000_000
    for given in ("80Gb", "much", "0GiB", "1.2.3GiB", "-1GiB", "1e999GiB", "1e999Gb"):
        with pytest.raises(InvalidArgumentError, match="a size must be a number above 0 with a"):
            bytes_in(given)


def _file(folder, **changed):
    content = {
        "ranks": 16, "device": "H100-SXM", "links": [
            {"ranks": 8, "latency": 3e-6, "bandwidth": 450e9},
            {"ranks": 16, "latency": 8e-6, "bandwidth": 50e9},
        ],
    }  # fmt: skip
    path = folder / "cluster.json"
    path.write_text(json.dumps({k: v for k, v in {**content, **changed}.items() if v is not None}))
    return path


def test_clusters_are_read_and_written(tmp_path):
    found = read_cluster(_file(tmp_path))
    assert found.device == DEVICES["H100-SXM"]
    assert found.links == (Link(8, 3e-6, 450e9), Link(16, 8e-6, 50e9))
    assert read_cluster(_file(tmp_path), 8).ranks == 8
    measured = replace(
        cluster_named("A100-SXM-80GB", 16), links=(Link(16, 1e-6, 1e9, {"send": (1e-6, 2e9)}),)
    )
    write_cluster(measured, tmp_path / "again.json")
    assert read_cluster(tmp_path / "again.json") == measured


DEVICE_OF_FILE = {"name": "x", "memory": 1, "flops": {"float32": 1}, "moving": 1}


NO_CLUSTERS = {
    'lacks \'ranks\': a cluster needs "ranks", "device" and "links"': {"ranks": None},
    "the links join 16 of 32 ranks: add one with": {"ranks": 32},
    "missing .* argument: 'bandwidth'": {"links": [{"ranks": 16, "latency": 3e-6}]},
    "a latency of at least 0 and a bandwidth above 0, got 3us seconds": {
        "links": [{"ranks": 16, "latency": "3us", "bandwidth": 1}]
    },
    "device 'H100-SX' is not one of V100-SXM2-32GB, .*H100-SXM": {"device": "H100-SX"},
    "is not a cluster": {"device": 5},
    "device x needs memory, moving and flops above 0": {"device": {**DEVICE_OF_FILE, "memory": 0}},
}


@pytest.mark.parametrize("message", NO_CLUSTERS)
def test_clusters_that_are_none_are_refused(tmp_path, message):
    with pytest.raises(InvalidArgumentError, match=message):
        read_cluster(_file(tmp_path, **NO_CLUSTERS[message]))


def test_files_that_are_no_clusters_are_refused(tmp_path):
    (tmp_path / "text").write_text("text")
    for call, message in {
        partial(read_cluster, tmp_path / "nowhere.json"): "cannot be read",
        partial(read_cluster, tmp_path / "text"): "is not JSON",
        partial(read_cluster, _file(tmp_path), 64): "16 ranks, but the job needs 64",
        partial(Cluster, 8, DEVICE, (Link(8, 0, 1), Link(4, 0, 1))): "must join more ranks",
    }.items():
        with pytest.raises(InvalidArgumentError, match=message):
            call()


def test_a_dtype_without_a_figure_is_refused():
    with pytest.raises(InvalidArgumentError, match="has no flops of float64, only of float16"):
        time(replace(ALONE, dtype="float64"), Layout(Grid()), cluster_named("H100-SXM", 8))

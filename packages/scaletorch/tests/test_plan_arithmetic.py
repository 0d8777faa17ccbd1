"""The arithmetic of a plan on small descriptions made by hand, and on schedules as data."""

import pickle
import random
import re
from collections import Counter
from dataclasses import replace
from itertools import product
from operator import mul

import pytest

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.parallel.data_parallel import DataParallelBucket
from scaletorch.parallel.pg_manager import Grid, legal_layouts
from scaletorch.parallel.pipeline_parallel import Action, Send, check, derive_messages
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
    lines,
    plan,
    search,
)
from scaletorch.plan import traffic as traffic_module
from scaletorch.plan.applying import arguments
from scaletorch.plan.gradients.brought import most_brought
from scaletorch.plan.gradients.filling import gradients_in
from scaletorch.plan.gradients.gathering import gathered, gathered_forward
from scaletorch.plan.gradients.open_buckets import most_filled
from scaletorch.plan.holding import holdings
from scaletorch.plan.holding.buckets import Held, fill
from scaletorch.plan.holding.live import backwards, most_live, outer
from scaletorch.plan.holding.stages import places, schedule_of, stages_of
from scaletorch.plan.memory import Peaks, memory, peak
from scaletorch.plan.traffic import ranks_send

SCHEDULES = [
    ("1f1b", 1), ("afab", 1), ("zb_h1", 1), ("looped_bfs", 3), ("interleaved_1f1b", 1),
    ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("zb_v", 2), ("dualpipe_v", 2),
]  # fmt: skip
CHANGES = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1)}  # micro-batches, halves


def parameter(name, elements, tp):
    share, rest = divmod(elements, tp)
    local = tuple(share + (at < rest) for at in range(tp))
    return Parameter(name, elements, 4, local)


def sketch(layers=8, tied=False, sizes=(1, 2, 4)):
    """Return a model whose layers keep 1,000 bytes a row, and hand on 40."""
    cuts = {}
    for tp in sizes:
        for cp in sizes:
            hand = Affine(0, 40)
            said = (Sent("tp", "all_reduce", "forward", 2, Affine(0, 10)),
                    Sent("tp", "all_reduce", "forward", 1, Affine(0, 7), again=False),
                    Sent("tp", "all_reduce", "backward", 2, Affine(0, 10)))  # fmt: skip
            cuts[Cut(tp, cp, cp_method="ring" if cp > 1 else "")] = (
                Behaviour((parameter("e", 300, tp),), kept=Affine(0, 50), handed=hand),
                Behaviour(
                    (parameter("w", 101, tp), parameter("b", 10, tp)), kept=Affine(8, 1000),
                    shared=Affine(5), entered=Affine(0, 40), again=Affine(8, 960),
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


def sent(description, layout):
    return ranks_send(holdings.Holdings(description), layout)


def cluster(ranks, memory=2**20):
    return Cluster(ranks, Device("d", memory, {}, 1.0), (Link(ranks, 1e-6, 1e9),))


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_what_is_alive_is_what_the_checked_schedule_keeps(name, chunks):
    random_ = random.Random(name)
    for ranks in range(1, 7):
        for micro_batches in (*range(1, 14), 6 * ranks + 2, 40):
            layout = Layout(
                Grid(pp=ranks), schedule=name, chunks=chunks, micro_batches=micro_batches
            )
            built = schedule_of(layout)
            live = most_live(name, ranks, micro_batches, chunks)
            assert stages_of(name, ranks, chunks) == built.stages
            peaks = tuple(max(sum(now) for each in own for now in each.moments) for own in live)
            assert peaks == check(built).peak_live
            weights = [random_.randint(1, 9) for _ in range(2 * chunks)]
            for own, actions in zip(live, built.ranks, strict=True):
                found = {
                    (each.kind, each.chunk): max(
                        sum(map(mul, now, weights)) for now in each.moments
                    )
                    for each in own
                }
                assert found == heaviest(actions, weights)
            counts = [Counter(a.chunk for a in own if a.kind != "F") for own in built.ranks]
            assert backwards(name, ranks, micro_batches, chunks) == tuple(
                tuple(own[at] for at in range(chunks)) for own in counts
            )


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
@pytest.mark.parametrize("which", ["first", "each", "last"])
def test_gradients_are_there_from_the_backward_that_brings_them(name, chunks, which):
    random_ = random.Random(name)
    halves = name in ("zb_h1", "zb_v", "dualpipe_v")
    for ranks in range(1, 6):
        for micro_batches in (*range(1, 10), 3 * ranks + 1, 48):
            layout = Layout(
                Grid(pp=ranks), schedule=name, chunks=chunks, micro_batches=micro_batches
            )
            size = chunks * (1 + halves)
            kept, gradients = ([random_.randint(1, 9) for _ in range(size)] for _ in range(2))
            programs = schedule_of(layout).ranks
            for own, actions in zip(most_brought(layout, which), programs, strict=True):
                found = {
                    (each.kind, each.chunk, each.brings): max(
                        sum(map(mul, (*now, *there), (*kept, *gradients)))
                        for now, there, _ in each.moments
                    )
                    for each in own
                }
                assert found == heaviest_brought(actions, kept, gradients, which, halves=halves)


def heaviest_brought(actions, kept, gradients, which, *, halves):
    """Return the most of micro-batches and gradients while actions run; bringing ones apart."""
    found = Counter()
    now, there, half = 0, {}, len(kept) // 2
    last = max(at for at, (kind, *_) in enumerate(actions) if kind != "F")
    for at, (kind, _, chunk) in enumerate(actions):
        made = {"B": {chunk, chunk + half * halves}, "I": {chunk}, "W": {chunk + half}}
        own = made.get(kind, set())
        if which == "first":
            own = own - there.keys()
        elif which == "last":
            own = {*range(len(kept))} if at == last else set()
        before = now + sum(there.values())
        whole, part = CHANGES[kind]
        now += whole * kept[chunk] + (part * kept[chunk + half] if part else 0)
        key = kind, chunk, bool(own)
        found[key] = max(found[key], now + sum(there.values()) if kind == "F" else before)
        there |= {at: gradients[at] for at in own}
    found["E", 0, False] = now + sum(there.values())
    return found


def heaviest(actions, weights):
    """Return the most that is kept while actions of each kind and chunk run."""
    found = Counter()
    now = 0
    for kind, _, chunk in actions:
        before = now
        whole, half = CHANGES[kind]
        now += whole * weights[chunk] + half * weights[chunk + len(weights) // 2]
        found[kind, chunk] = max(found[kind, chunk], now if kind == "F" else before)
    return found


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_messages_are_those_that_are_derived(name, chunks):
    layout = Layout(Grid(pp=2), schedule=name, chunks=chunks, micro_batches=3)
    programs = derive_messages(schedule_of(layout))
    for own, program in zip(sent(sketch(), layout), programs, strict=True):
        sends = sum(isinstance(each, Send) for each in program)
        (found,) = (each for each in own if each.operation == "send")
        assert (found.count, found.bytes) == (sends, sends * 40)
        assert any(isinstance(each, Action) for each in program)


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


def test_zero_divides_what_it_says():
    known = sketch()
    whole, first, second, third = (
        memory(known, Layout(Grid(dp=4), zero=zero, micro_batches=2))[0] for zero in range(4)
    )
    elements = known.elements
    padded = -(-elements // 4) * 4
    assert (whole.parameters, whole.gradients) == (4 * elements, 4 * elements)
    assert whole.optimizer == 8 * elements + 4 * 19
    assert (first.parameters, first.gradients) == (4 * padded, 4 * padded)  # no shards so far
    parts = 75 + 8 * (26 + 3) + 3 + 75  # of each parameter, of 4 ranks
    assert (second.gradients, third.parameters) == (padded, 4 * parts)
    assert third.optimizer == 8 * parts + 4 * 19
    assert 8 * padded // 4 < first.optimizer < 8 * padded // 4 + 4 * 19
    assert first.activations == whole.activations == second.activations
    wide = memory(known, Layout(Grid(dp=4)), Optimizer(sum_item=8))[0]
    assert wide.gradients == 12 * elements


def test_zero_3_has_a_layer_and_its_neighbours_whole():
    known = holdings.Holdings(sketch())
    rest, layer, head, share = 4 * (300 + 12 + 300), 4 * (104 + 12), 4 * 310, 4 * (26 + 3)
    for batches, shards in ((1, 1), (2, 0)):  # of gradients of the layers behind
        layout = Layout(Grid(dp=4), zero=3, micro_batches=batches)
        moments, most = gathered(known, layout, known.numbers(layout)[0]), {}
        for block, (size,) in zip(moments.blocks, moments.bytes, strict=True):
            most[block] = max(size, most.get(block, 0))
        own = 4 * (101 + 10)
        assert most[0] == rest + layer + head
        assert most[1] == rest + 2 * layer + head + own  # the layer, the next, and gradients
        for at in range(2, 8):  # and what is being summed of the one behind
            assert most[at] == rest + 3 * layer + head + own + shards * share * (at - 1)
        assert most[9] == rest + layer + head + 1200 + 8 * shards * share
        assert most[10] == head + 1200 + rest + 8 * shards * share
    assert gathered_forward(known, layout, 0) == [2 * rest, *[rest + 2 * layer] * 8, rest]
    held = memory(known.description, layout, holdings=known)[0]
    assert peak(known, layout) == held.total


def test_heads_that_are_tied_are_the_first_to_fill_buckets():
    known = holdings.Holdings(sketch(tied=True))
    layout = Layout(Grid(pp=2, dp=2), zero=2)
    [(at, names), *_] = gradients_in(known, layout, known.numbers(layout)[1], "B", 0)
    assert (at, names) == (4, ["2.h", "2.n"])
    taken = replace(known.description.cuts[Cut()][2], made=(("n", Affine(), Affine(), Affine()),))
    cuts = {Cut(): (*known.description.cuts[Cut()][:2], taken)}
    known = holdings.Holdings(replace(known.description, cuts=cuts))
    [(_, names), *_] = gradients_in(known, layout, known.numbers(layout)[1], "B", 0)
    assert names == ["2.h", "2.n"]


def test_sixteen_bits_have_masters_only_where_the_state_is_shared():
    known = sketch()
    kinds = tuple(
        replace(kind, parameters=tuple(replace(p, item=2) for p in kind.parameters))
        for kind in known.cuts[Cut()]
    )
    half = replace(known, cuts={Cut(): kinds})
    elements, padded = known.elements, -(-known.elements // 4) * 4
    plain, shared = (memory(half, Layout(Grid(dp=4), zero=zero))[0] for zero in (0, 1))
    assert plain.optimizer == 4 * elements + 4 * 19
    assert 12 * padded // 4 < shared.optimizer < 12 * padded // 4 + 4 * 19
    assert shared.gradients == 2 * padded


def test_activations_are_those_of_micro_batches_under_way():
    known = sketch()
    layout = Layout(Grid(pp=2), micro_rows=3, micro_batches=8)
    layers, hand = 4 * (8 + 3000), 3 * 40
    first, last = memory(known, layout)
    # Two kept until their backward, and six sent before; and a gradient that is used. Six gradients
    # sent, and a hidden state that is used.
    assert (first.buffers, last.buffers) == (9 * hand, 7 * hand)
    assert first.activations == 2 * (150 + layers + 5)
    assert last.activations == layers + 5 + 600
    assert (first.working, last.working) == (90, 300)
    full = memory(known, replace(layout, recompute="full"))
    assert [each.activations for each in full] == [2 * (150 + 4 * hand + 5), 4 * hand + 605]
    assert full[0].working == 90 + 8 + 3 * 960  # what it keeps but for its input, which is kept
    gone = memory(known, replace(layout, recompute="offload"))
    assert [each.activations for each in gone] == [2 * 150, 600]


def test_the_gradient_of_an_output_counts_while_its_block_runs_backward():
    known = sketch(sizes=(1,))
    first, layer, last = known.cuts[Cut()]
    kinds = (
        first,
        replace(layer, backward_peak=Affine(0, 500)),
        replace(last, entered=Affine(0, 40)),
    )
    (held,) = memory(replace(known, cuts={Cut(): kinds}), Layout(Grid(dp=2)))
    assert held.working == 500 + 40 - 200  # what is behind has run, and keeps nothing more


def test_gradients_that_no_ranks_sum_count_when_they_are_there():
    known = sketch()
    e, layer, last = 4 * 300, 4 * 111, 4 * 310

    def first_rank(count, schedule="1f1b"):
        layout = Layout(Grid(pp=2), schedule=schedule, micro_rows=3, micro_batches=count)
        return memory(known, layout)[0]

    # All micro-batches are alive, and none has run backward: then none of its gradients is there,
    # but those of layers behind the one that runs.
    assert first_rank(1).gradients == first_rank(2).gradients == 0
    assert first_rank(2).working == 90
    assert first_rank(3).gradients == e + 4 * layer
    assert first_rank(5, "afab").gradients == 0
    assert memory(known, Layout(Grid(pp=2, dp=2), micro_batches=2))[0].gradients == e + 4 * layer
    small = replace(known, cuts={cut: tuple(
        replace(kind, kept=Affine(), shared=Affine(), backward_peak=Affine()) for kind in kinds
    ) for cut, kinds in known.cuts.items()})  # fmt: skip
    at_end = memory(small, Layout(Grid(pp=2)))
    assert [each.gradients for each in at_end] == [e + 4 * layer, 4 * layer + last]
    # While the last layer's backward, and then each other's, runs for the first time, those of
    # blocks behind it have come.
    busy = replace(small, cuts={cut: tuple(
        replace(kind, backward_peak=Affine(5000 * (kind is kinds[1]))) for kind in kinds
    ) for cut, kinds in small.cuts.items()})  # fmt: skip
    (alone,) = memory(busy, Layout(Grid()))
    assert (alone.gradients, alone.working) == (0, 5000 + 40 + 7 * layer + last)


def test_a_layout_is_what_parallelize_takes():
    layout = Layout(Grid(), recompute="selective")
    with pytest.raises(InvalidArgumentError, match="sketch is not described with selective"):
        memory(sketch(), layout)
    assert arguments(layout)["recompute"] == "selective"
    assert arguments(Layout(Grid(pp=2), recompute="full", zero=1))["recompute"] is True


def test_what_runs_again_sends_again():
    known = sketch()
    for recompute, calls, size in (("none", 5, 27), ("full", 7, 37), ("offload", 5, 27)):
        layout = Layout(Grid(tp=2), recompute=recompute, micro_rows=2, micro_batches=3)
        (found,) = (each for each in sent(known, layout)[0] if each.axis == "tp")
        assert (found.count, found.bytes) == (8 * 3 * calls, 8 * 3 * size * 2)


def test_buckets_are_filled_as_the_wrapper_fills_them():
    torch = pytest.importorskip("torch")
    random_ = random.Random(0)
    for _ in range(20):
        sizes = [random_.choice((3, 2**14, 2**18, 2**20)) for _ in range(random_.randint(1, 12))]
        with torch.device("meta"):
            module = torch.nn.ParameterList([torch.empty(size) for size in sizes])
        limit = random_.choice((2**16, 2**24))
        found = DataParallelBucket(module, bucket_size=limit).get_bucket_info()
        held = [Held(size, 4) for size in reversed(sizes)]
        planned = [sum(each.elements for each in own) for own in fill(held, limit)]
        assert planned == [bucket["elements"] for bucket in found]


def test_lines_add_up():
    random_ = random.Random(1)
    known = sketch(tied=True)
    for grid in legal_layouts(8):
        if grid.tp > 4 or grid.cp > 4 or grid.pp > 4:
            continue
        layout = Layout(
            grid, zero=random_.randint(0, 2), recompute=random_.choice(("none", "full", "offload")),
            schedule="zb_v" if grid.pp > 1 else "1f1b", chunks=2 if grid.pp > 1 else 1,
            micro_rows=2, micro_batches=5,
        )  # fmt: skip
        held = memory(known, layout)
        for rank, own in enumerate(held):
            assert sum(line.bytes for line in lines(known, layout, rank)) == own.total
        assert sum(line.bytes for line in lines(known, layout)) == max(e.total for e in held)


def test_every_grid_is_planned_or_refused_with_a_reason():
    found = plan(sketch(), 24, cluster(16))
    grids = {each.layout.grid for each in found.estimates} | {each.grid for each in found.refused}
    assert grids == {*legal_layouts(16)}
    assert [each.peak for each in found.estimates] == sorted(e.peak for e in found.estimates)
    assert found.best() is found.estimates[0]
    assert all(each.layout.grid.world_size == 16 for each in found.estimates)
    told = {each.why for each in found.refused}
    assert "24 rows are no multiple of dp 16 x 1 rows of a micro-batch" in told
    assert "8 layers are fewer than pp 16 x 1 chunks: each stage needs one" in told
    assert "sketch is not described for tp 16, cp 1" in told


def test_what_ranks_hold_and_send_is_worked_out_for_estimates_that_are_looked_at(monkeypatch):
    made = []
    for name in ("ranks_hold", "ranks_send"):
        plain = getattr(search, name)

        def counted(*args, plain=plain, name=name):
            made.append(name)
            return plain(*args)

        monkeypatch.setattr(search, name, counted)
    known = sketch()
    best = plan(known, 24, cluster(16)).best()
    assert made == []
    assert best.memory == memory(known, best.layout)
    assert best.traffic == sent(known, best.layout)
    assert best.peak == max(each.total for each in best.memory)
    assert made == ["ranks_hold", "ranks_send"]
    again = pickle.loads(pickle.dumps(best))
    assert again == best
    assert (type(again.memory), type(again.traffic)) == (tuple, tuple)
    plain = replace(best, memory=tuple(best.memory), traffic=tuple(best.traffic))
    assert (plain, plain.as_json()) == (best, best.as_json())


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
    told = re.compile(r"needs [\d.]+ KiB of 1000 B before a step, with zero \d")
    assert any(told.fullmatch(each.why) for each in nothing.refused)
    with pytest.raises(InvalidArgumentError, match="no layout of 2 ranks can train sketch: TP"):
        nothing.best()


def test_what_is_refused_needs_what_it_says_or_at_least_so_much():
    description = sketch(layers=11)
    known, said = holdings.Holdings(description), Counter()
    options = Options(schedules=(("1f1b", 1), ("interleaved_1f1b", 2)), zero=(1, 2))
    for room in (6_000, 12_000, 16_000, 20_000):
        for each in plan(description, 64, cluster(8, room), options=options).refused:
            told = re.match(r"needs (at least |)(\S+) KiB", each.why)
            if told and each.layout:
                found, bound = peak(known, each.layout), 2**10 * float(told[2])
                how = told[1].strip() or ("before" if " before a step" in each.why else "")
                said[how] += 1
                assert found > room
                above = bound - found
                assert (above if how else abs(above)) <= 5e-3 * found
                assert how != "before" or bound > room * 0.995
    assert min(said["at least"], said["before"], said[""]) > 0, said


def test_buckets_are_summed_once_for_all_rows_of_micro_batches(monkeypatch):
    calls = Counter()

    def counted(module, name):
        plain = getattr(module, name)

        def run(*args, **options):
            calls[name] += 1
            return plain(*args, **options)

        monkeypatch.setattr(module, name, run)

    counted(traffic_module, "_gradients")
    counted(holdings, "fill")
    found = []
    for rows in ((1,), (1, 2, 4)):
        calls.clear()
        number = len(plan(sketch(), 64, cluster(16), options=Options(micro_rows=rows)).estimates)
        found.append((number, dict(calls)))
    (few, once), (many, again) = found
    assert many > 2 * few > 0
    assert again == once
    assert all(once.values())


@pytest.mark.parametrize("dp", [1, 2])  # alone, a step brings gradients
@pytest.mark.parametrize("tied", [False, True])
def test_the_peak_of_a_layout_is_that_of_its_fullest_rank(tied, dp):
    description = sketch(layers=11, tied=tied)
    known = holdings.Holdings(description)
    tried = 0
    for (name, chunks), zero, recompute, batches, tp in product(
        SCHEDULES, range(3), ("none", "full", "offload"), (1, 3, 8, 20), (1, 2)
    ):
        layout = Layout(
            Grid(tp=tp, pp=2 if chunks > 2 else 4, dp=dp), zero=zero, recompute=recompute,
            schedule=name, chunks=chunks, micro_rows=2, micro_batches=batches,
        )  # fmt: skip
        held = memory(description, layout)
        assert peak(known, layout) == max(each.total for each in held), layout
        found, other = peak(known, layout), replace(layout, zero=(zero + 1) % 3)
        least, most, _ = Peaks(known, other)(recompute, zero)
        assert least <= found <= most, layout
        for room in (least - 1, found - 1, found):
            least, near, _ = Peaks(known, other, room)(recompute, zero)
            assert (near is None) == (least > room) or least == near
            assert least <= found <= (near or found), layout
        assert least == most or (zero and dp > 1)
        assert memory(description, layout, holdings=known) == held
        assert ranks_send(known, layout) == sent(description, layout)
        tried += 1
    assert tried == 9 * 3 * 3 * 4 * 2


def test_cuts_that_are_summed_at_once_keep_their_own_numbers():
    plain = sketch()
    description = replace(plain, cuts={
        cut: tuple(replace(b, kept=Affine(0, b.kept.per_row * cut.tp + cut.cp)) for b in own)
        for cut, own in plain.cuts.items()
    })  # fmt: skip
    known, peaks = holdings.Holdings(description), set()
    for tp, cp in ((1, 4), (2, 2), (4, 1)):
        layout = Layout(Grid(tp=tp, cp=cp, pp=2), micro_batches=4)
        peaks.add(peak(known, layout))
        assert peak(known, layout) == max(each.total for each in memory(description, layout))
    assert len(peaks) == 3


def test_what_comes_in_a_last_backward_is_beside_one_micro_batch():
    layout = Layout(Grid(pp=4, dp=2), zero=1, micro_rows=16, micro_batches=8)
    known = holdings.Holdings(sketch(layers=8))
    bounds = Peaks(known, layout)("none", 1)
    assert bounds.least == bounds.most
    single = Peaks(known, replace(layout, micro_batches=1))("none", 1)
    assert single.least < single.most


def test_buckets_that_leave_in_order_are_not_all_open():
    one, two = (
        Layout(Grid(pp=2, dp=2), zero=2, schedule=name, chunks=chunks, micro_batches=4)
        for name, chunks in (("1f1b", 1), ("interleaved_1f1b", 2))
    )
    most = []
    for size in (1, 300):  # of which some have gradients of two chunks
        known = holdings.Holdings(sketch(layers=64), holdings.Optimizer(bucket_size=size))
        for layout in (one, two):
            chunks = range(layout.chunks)
            each = product(known.numbers(layout), chunks)
            most.append(max(most_filled(known, layout, at, "B", chunk) for at, chunk in each))
        held, bounds = peak(known, two.saving("full", 2)), Peaks(known, two)("full", 2)
        assert bounds.least < held <= bounds.most
    whole, parted, together, waiting = most
    assert parted < whole < together < waiting
    halves = Layout(Grid(pp=2, dp=2), zero=2, schedule="zb_h1", micro_batches=4)
    for at in known.numbers(halves):  # the second ones make nothing of this model's gradients
        first, second = (most_filled(known, halves, at, kind, 0) for kind in "IW")
        assert 0 < second < first
    bounds = Peaks(known, halves)("none", 2)
    assert bounds.least < peak(known, halves) <= bounds.most


def test_gradients_that_a_step_brings_are_those_of_a_layouts_own_cut():
    """Peaks of cuts with the same etp, and of one cut with two, all of one description."""
    first, layer, last = sketch().cuts[Cut()]
    cuts = {}
    for tp, ep in ((1, 1), (2, 2), (2, 1)):
        experts = Parameter("experts", 1600, 4, (1600 // ep,) * ep, expert=True)
        own = replace(layer, parameters=(parameter("w", 1000, tp), experts))
        cuts[Cut(tp, ep=ep)] = first, own, last
    description = replace(sketch(), cuts=cuts)
    known = holdings.Holdings(description)
    peaks = []
    for tp, ep, etp in ((1, 1, 1), (2, 2, 1), (2, 1, 1), (2, 1, 2)):
        grid = Grid(tp=tp, pp=2, ep=ep, etp=etp)
        layout = Layout(grid, schedule="1f1b", micro_batches=4)
        peaks.append(peak(known, layout))
        assert peaks[-1] == max(each.total for each in memory(description, layout)), layout
    assert len({*peaks}) > 2


def test_moments_that_are_left_out_are_never_the_most():
    random_ = random.Random(0)
    left_out = 0
    for _ in range(200):
        counts = {tuple(random_.randint(0, 6) for _ in range(4)) for _ in range(12)}
        kept = outer(counts)
        assert {*kept} <= counts
        left_out += len(counts) - len(kept)
        for _ in range(20):
            sizes = [random_.randint(0, 9) for _ in range(4)]
            most, other = (max(sum(map(mul, n, sizes)) for n in own) for own in (counts, kept))
            assert most == other
    assert left_out > 0
    assert outer({(4, 0), (3, 1), (2, 2), (0, 4)}) == [(4, 0), (0, 4)]


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


def test_what_ep_does_not_divide_is_put_in_buckets_once(monkeypatch):
    filled = []
    plain = holdings.fill

    def counted(held, *args, **options):
        filled.append(any(each.expert for each in held))
        return plain(held, *args, **options)

    monkeypatch.setattr(holdings, "fill", counted)
    found = []
    for sizes in ((2,), (2, 4, 8)):
        filled.clear()
        assert plan(mixed(sizes), 64, cluster(16)).estimates
        found.append((filled.count(False), filled.count(True)))
    (once, own), (again, each) = found
    assert once > 0
    assert own > 0
    assert each > own
    assert again == once


def mixed(sizes):
    """Return a sketch of which a layer has experts too, shared out over these sizes of ep."""
    plain = sketch(sizes=(1,))
    first, layer, last = plain.cuts[Cut()]
    cuts = {}
    for ep in sizes:
        experts = Parameter("experts", 1600, 4, (1600 // ep,) * ep, expert=True)
        own = replace(layer, parameters=(*layer.parameters, experts))
        cuts[Cut(ep=ep)] = first, own, last
    return replace(plain, cuts=cuts)


def test_lines_name_blocks():
    layout = Layout(Grid(pp=2), micro_batches=3)
    said = [line.what for line in lines(sketch(), layout, 0)]
    assert "2 micro-batches of 4 x l.0" in said
    again = [line.what for line in lines(sketch(), replace(layout, recompute="full"), 0)]
    assert "2 micro-batches of inputs of 4 x l.0" in again


def test_a_plan_needs_rows_and_ranks():
    with pytest.raises(InvalidArgumentError, match="needs rows and ranks, not 0 rows, 2 ranks"):
        plan(sketch(), 0, cluster(2))

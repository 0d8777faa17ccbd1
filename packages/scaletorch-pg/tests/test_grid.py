"""The grid as plain data: arithmetic on any number of ranks, the view of experts, errors."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.parallel.pg_manager import (
    Coordinates,
    ExpertCoordinates,
    Grid,
    count_communicators,
    groups,
    legal_layouts,
)
from scaletorch.parallel.pg_manager.grid import divisors

ORDER = ("dp", "pp", "cp", "tp")
EXPERTS = ("edp", "ep", "etp")


def joined(axes):
    """All names of one or several of these axes, in any order."""
    counts = range(1, len(axes) + 1)
    return ["_".join(names) for n in counts for names in itertools.permutations(axes, n)]


AXES = ["world", "all", *joined(ORDER), *joined(EXPERTS)]
sizes = st.integers(1, 4)


@st.composite
def grids(draw):
    """Any grid of up to 256 ranks, with any view of experts that folds."""
    tp, cp, pp, dp = (draw(sizes) for _ in range(4))
    etp = draw(st.sampled_from([1, tp]))
    ep = draw(st.sampled_from(divisors(tp * cp * dp // etp)))
    return Grid(tp=tp, cp=cp, pp=pp, dp=dp, ep=ep, etp=etp)


def places(grid):
    """Each rank's index on every axis, by the definitions.

    tp is the fastest axis. The view of experts is each stage's line in (dp, cp, tp), folded anew.
    """
    found = []
    for place in itertools.product(*(range(getattr(grid, axis)) for axis in ORDER)):
        dp, pp, cp, tp = place
        rest, etp = divmod((dp * grid.cp + cp) * grid.tp + tp, grid.etp)
        edp, ep = divmod(rest, grid.ep)
        found.append({"dp": dp, "pp": pp, "cp": cp, "tp": tp, "edp": edp, "ep": ep, "etp": etp})
    return found


@settings(max_examples=200, deadline=None)
@given(grids())
def test_coordinates_and_rank_are_inverse(grid):
    every = places(grid)
    assert len(every) == grid.world_size
    for rank, place in enumerate(every):
        own = {axis: place[axis] for axis in ORDER}
        assert grid.coordinates(rank) == Coordinates(**own)
        assert grid.expert_coordinates(rank) == ExpertCoordinates(*(place[x] for x in EXPERTS))
        assert grid.rank(**own) == rank


@settings(max_examples=400, deadline=None)
@given(grids(), st.sampled_from(AXES))
def test_groups_hold_the_ranks_that_agree_on_all_other_axes(grid, axis):
    names = ORDER if axis in ("world", "all") else axis.split("_")
    others = {"pp", *EXPERTS} if names[0] in EXPERTS else set(ORDER)
    expected = {}
    for rank, place in enumerate(places(grid)):
        fixed = tuple(place[name] for name in sorted(others - set(names)))
        expected.setdefault(fixed, []).append(rank)
    assert grid.groups(axis) == sorted(map(tuple, expected.values()))
    assert grid.edp * grid.ep * grid.etp == grid.size("tp_cp_dp")
    for group in grid.groups(axis):
        assert len(group) == grid.size(axis)
        for position, rank in enumerate(group):
            assert grid.group(axis, rank) == group
            assert grid.group_rank(axis, rank) == position


@settings(max_examples=200, deadline=None)
@given(grids(), st.sampled_from(AXES), st.data())
def test_ring_neighbours_answer_each_other_and_visit_the_group(grid, axis, data):
    rank = data.draw(st.integers(0, grid.world_size - 1))
    ring = grid.ring_neighbours(axis, rank)
    assert grid.ring_neighbours(axis, ring.send).recv == rank
    assert grid.ring_neighbours(axis, ring.recv).send == rank
    visited = [rank]
    while (after := grid.ring_neighbours(axis, visited[-1]).send) != rank:
        visited.append(after)
    assert sorted(visited) == list(grid.group(axis, rank))


@settings(max_examples=200, deadline=None)
@given(grids(), st.data())
def test_pipeline_neighbours_answer_each_other_and_end(grid, data):
    rank = data.draw(st.integers(0, grid.world_size - 1))
    stage = grid.coordinates(rank).pp
    before, after = grid.pipeline_neighbours(rank)
    stages = grid.group("pp", rank)
    assert before == (stages[stage - 1] if stage else None)
    assert after == (stages[stage + 1] if stage < grid.pp - 1 else None)
    if after is not None:
        assert grid.pipeline_neighbours(after).prev == rank


@settings(max_examples=300, deadline=None)
@given(grids())
def test_either_all_groups_of_two_axes_are_the_same_or_none_is(grid):
    """So either all ranks share a group of an earlier axis, or all make one: nobody waits."""
    found = [set(grid.groups(axis)) for axis in groups.AXES]
    for one, other in itertools.combinations(found, 2):
        assert one == other or one.isdisjoint(other)


@pytest.mark.parametrize(("sizes", "count"), [({"tp": 2, "dp": 2}, 3), ({"pp": 4}, 2)])
def test_communicators_are_those_of_distinct_groups(sizes, count):
    assert count_communicators(Grid(**sizes)) == count


@settings(max_examples=300, deadline=None)
@given(sizes, sizes, sizes, sizes)
def test_all_views_of_a_layout_are_told_apart_by_their_names(tp, cp, pp, dp):
    """Ranks compare these names, so that two views under one would pass for the same."""
    every = [
        Grid(tp, cp, pp, dp, ep, etp)
        for etp in sorted({1, tp})
        for ep in divisors(tp * cp * dp // etp)
    ]
    assert len(set(every)) == len({str(grid) for grid in every}) == len(every)
    assert [grid for grid in every if "EP" not in str(grid)] == [Grid(tp, cp, pp, dp)]


@pytest.mark.parametrize(
    ("grid", "text"),
    [
        (Grid(tp=2, dp=2), "TP(2)-CP(1)-PP(1)-DP(2)"),
        (Grid(tp=2, dp=4, ep=4, etp=2), "TP(2)-CP(1)-PP(1)-DP(4)-EP(4)-ETP(2)"),
        (Grid(tp=2, dp=4, etp=1), "TP(2)-CP(1)-PP(1)-DP(4)-EP(1)-ETP(1)"),
    ],
)
def test_names_tell_of_experts_that_have_a_view_of_their_own(grid, text):
    assert str(grid) == text


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"tp": 2, "cp": 3, "pp": 5, "dp": 2, "ep": 8, "etp": 2},
            "ep * etp = 8 * 2 must divide the ranks of a stage, tp * cp * dp = 2 * 3 * 2 = 12; "
            "nearest legal ep sizes: 6, 3, 2",
        ),
        (
            {"tp": 4, "dp": 2, "ep": 2, "etp": 2},
            "etp size must be 1 (whole experts) or the tp size 4, got 2",
        ),
        ({"dp": 4, "ep": 2, "etp": 2}, "etp size must be 1, got 2"),
    ],
)
def test_sizes_that_do_not_fold_name_the_nearest_that_do(sizes, message):
    with pytest.raises(InvalidArgumentError) as caught:
        Grid(**sizes)
    assert str(caught.value) == message


@settings(max_examples=200, deadline=None)
@given(sizes, sizes, sizes, st.integers(1, 70), st.booleans())
def test_the_sizes_that_a_message_names_are_legal(tp, cp, dp, ep, cut):
    etp = tp if cut else 1
    try:
        assert Grid(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp).ep == ep
    except InvalidArgumentError as problem:
        for near in str(problem).rpartition(": ")[2].split(", "):
            assert Grid(tp=tp, cp=cp, dp=dp, ep=int(near), etp=etp).ep == int(near)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2"])
@pytest.mark.parametrize("axis", [*ORDER, "ep", "etp"])
def test_sizes_that_are_not_positive_ints(axis, size):
    with pytest.raises(InvalidArgumentError) as caught:
        Grid(**{axis: size})
    assert str(caught.value) == f"{axis} size must be a positive int, got {size!r}"


@pytest.mark.parametrize("rank", [-1, 4, True, 1.0, "1", None])
@pytest.mark.parametrize(
    "call",
    [
        lambda grid, rank: grid.coordinates(rank),
        lambda grid, rank: grid.expert_coordinates(rank),
        lambda grid, rank: grid.group("tp", rank),
        lambda grid, rank: grid.group_rank("tp", rank),
        lambda grid, rank: grid.ring_neighbours("tp", rank),
        lambda grid, rank: grid.pipeline_neighbours(rank),
    ],
)
def test_ranks_outside_the_grid(call, rank):
    with pytest.raises(InvalidArgumentError) as caught:
        call(Grid(tp=2, pp=2), rank)
    expected = f"rank must be an int from 0 to 3, got {rank!r} (layout TP(2)-CP(1)-PP(2)-DP(1))"
    assert str(caught.value) == expected


@pytest.mark.parametrize("index", [-1, 2, True, "0"])
def test_coordinates_outside_their_axis(index):
    with pytest.raises(InvalidArgumentError) as caught:
        Grid(tp=2, pp=2).rank(pp=index)
    assert str(caught.value).startswith(f"pp coordinate must be an int from 0 to 1, got {index!r}")


@pytest.mark.parametrize(
    "axis", ["", "xp", "cp_", "cp-dp", "tp_tp", "world_tp", "TP", 3, None, "tp_ep", "ep_ep", "ep_"]
)
def test_unknown_axes(axis):
    with pytest.raises(InvalidArgumentError) as caught:
        Grid().group(axis, 0)
    assert str(caught.value) == (
        f"unknown axis {axis!r}: expected one of tp, cp, pp, dp, several of them joined by '_' "
        "(such as 'cp_dp'), or 'world'; or one or several of etp, ep, edp"
    )


@pytest.mark.parametrize(("world_size", "count"), [(1, 1), (2, 4), (7, 4), (12, 40), (16, 35)])
def test_legal_layouts_are_all_there_are(world_size, count):
    found = list(legal_layouts(world_size))
    assert len(found) == len(set(found)) == count
    assert {grid.world_size for grid in found} == {world_size}


@pytest.mark.parametrize("bad", [0, -4, 2.5, True, None])
def test_worlds_are_numbers(bad):
    with pytest.raises(InvalidArgumentError, match="world_size must be a positive int, got"):
        list(legal_layouts(bad))


def test_names_of_layouts_are_read_back_and_need_no_torch():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import scaletorch.parallel.pg_manager as pg\n"
        "assert all(pg.parse_layout(pg.layout_name(g)) == g for g in pg.legal_layouts(16))\n"
        "print(pg.layout_name(pg.Grid(tp=2, dp=4, ep=2, etp=2)), pg.parse_layout('dp4-ep2').ep)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200
    )
    assert (done.stdout, done.stderr) == ("4x1x1x2-ep2-etp2 2\n", "")

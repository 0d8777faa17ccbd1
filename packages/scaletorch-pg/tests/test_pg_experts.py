"""The view that experts have of the grid, as plain data on any number of ranks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.parallel.pg_manager import (
    ExpertCoordinates,
    Grid,
    groups,
    layouts,
    nearest_layouts,
)
from scaletorch.parallel.pg_manager.grid import divisors, wrong_fold

EXPERTS = ("edp", "ep", "etp")
JOINS = ["_".join(axes) for count in (1, 2, 3) for axes in itertools.permutations(EXPERTS, count)]

sizes = st.integers(1, 4)


@st.composite
def grids(draw):
    """Any grid of up to 256 ranks, with any view of experts that folds."""
    tp, cp, pp, dp = (draw(sizes) for _ in range(4))
    etp = draw(st.sampled_from([1, tp]))
    stage = tp * cp * dp // etp
    ep = draw(st.sampled_from([size for size in range(1, stage + 1) if stage % size == 0]))
    return Grid(tp=tp, cp=cp, pp=pp, dp=dp, ep=ep, etp=etp)


def folded(grid):
    """Each rank's (pp, edp, ep, etp) by the definition: stages' lines in (dp, cp, tp), folded."""
    places = {}
    for pp in range(grid.pp):
        inner = itertools.product(range(grid.dp), range(grid.cp), range(grid.tp))
        for index, (dp, cp, tp) in enumerate(inner):
            rest, etp = divmod(index, grid.etp)
            edp, ep = divmod(rest, grid.ep)
            places[grid.rank(dp=dp, pp=pp, cp=cp, tp=tp)] = (pp, edp, ep, etp)
    return places


@settings(max_examples=1000, deadline=None)
@given(grids())
def test_coordinates_are_the_line_of_the_stage_folded_anew(grid):
    places = folded(grid)
    assert len(places) == grid.world_size
    for rank, (pp, *place) in places.items():
        assert grid.expert_coordinates(rank) == ExpertCoordinates(*place)
        assert grid.coordinates(rank).pp == pp


@settings(max_examples=1000, deadline=None)
@given(grids(), st.sampled_from(JOINS))
def test_groups_hold_the_ranks_of_a_stage_that_agree_on_the_other_axes(grid, axis):
    names = axis.split("_")
    expected = {}
    for rank, (pp, *place) in sorted(folded(grid).items()):
        fixed = [index for name, index in zip(EXPERTS, place, strict=True) if name not in names]
        expected.setdefault((pp, *fixed), []).append(rank)
    expected = sorted(map(tuple, expected.values()))
    assert grid.groups(axis) == expected
    for group in expected:
        assert len(group) == grid.size(axis)
        assert len({grid.coordinates(rank).pp for rank in group}) == 1
        for position, rank in enumerate(group):
            assert grid.group(axis, rank) == group
            assert grid.group_rank(axis, rank) == position


@settings(max_examples=1000, deadline=None)
@given(grids())
def test_every_rank_is_in_one_group_of_each_axis_and_the_sizes_are_the_stage(grid):
    assert grid.edp * grid.ep * grid.etp == grid.size("tp_cp_dp") == grid.size("ep_edp_etp")
    assert grid.groups("ep_edp_etp") == sorted(grid.groups("tp_cp_dp"))
    for axis in EXPERTS:
        assert grid.size(axis) == getattr(grid, axis)
        found = list(itertools.chain(*grid.groups(axis)))
        assert sorted(found) == list(range(grid.world_size))


@settings(max_examples=1000, deadline=None)
@given(grids())
def test_either_all_groups_of_two_axes_are_the_same_or_none_is(grid):
    """So either all ranks share a group of an earlier axis, or all make one: nobody waits."""
    found = [set(grid.groups(axis)) for axis in groups.AXES]
    for one, other in itertools.combinations(found, 2):
        assert one == other or one.isdisjoint(other)


@settings(max_examples=300, deadline=None)
@given(grids(), st.sampled_from(JOINS), st.data())
def test_ring_neighbours_answer_each_other_and_visit_the_group(grid, axis, data):
    rank = data.draw(st.integers(0, grid.world_size - 1))
    ring = grid.ring_neighbours(axis, rank)
    assert grid.ring_neighbours(axis, ring.send).recv == rank
    visited = [rank]
    while (after := grid.ring_neighbours(axis, visited[-1]).send) != rank:
        visited.append(after)
    assert sorted(visited) == list(grid.group(axis, rank))


@settings(max_examples=300, deadline=None)
@given(sizes, sizes, sizes, sizes)
def test_the_plain_view_is_that_of_all_other_layers(tp, cp, pp, dp):
    grid = Grid(tp, cp, pp, dp)
    assert grid.is_plain
    assert grid == Grid(tp, cp, pp, dp, 1) == Grid(tp, cp, pp, dp, 1, tp)
    assert (grid.ep, grid.etp, grid.edp) == (1, tp, cp * dp)
    assert grid.groups("edp") == grid.groups("cp_dp")
    assert grid.groups("etp") == grid.groups("tp")
    assert grid.groups("ep") == [(rank,) for rank in range(grid.world_size)]
    assert "EP" not in str(grid)


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
        (Grid(dp=4, ep=4), "TP(1)-CP(1)-PP(1)-DP(4)-EP(4)"),
        (Grid(tp=2, dp=4, ep=4), "TP(2)-CP(1)-PP(1)-DP(4)-EP(4)"),
        (Grid(tp=2, dp=4, ep=4, etp=2), "TP(2)-CP(1)-PP(1)-DP(4)-EP(4)-ETP(2)"),
        (Grid(tp=2, dp=4, etp=1), "TP(2)-CP(1)-PP(1)-DP(4)-EP(1)-ETP(1)"),
    ],
)
def test_names(grid, text):
    assert str(grid) == text


def test_documented_example_of_1024_ranks():
    grid = Grid(tp=8, cp=4, pp=16, dp=2, ep=32)
    assert (grid.ep, grid.etp, grid.edp) == (32, 1, 2)
    assert str(grid.expert_coordinates(300)) == "edp0 ep12 etp0"
    assert grid.group("ep", 300) == tuple(range(288, 320))
    assert grid.group("edp", 300) == (300, 812)
    wide = Grid(tp=8, cp=4, pp=16, dp=2, ep=8, etp=8)
    assert wide.group("etp", 300) == wide.group("tp", 300)
    assert wide.group("ep", 300) == (292, 300, 308, 316, 804, 812, 820, 828)
    assert wide.group("edp", 300) == (300,)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"tp": 2, "dp": 4, "ep": 3},
            "ep * etp = 3 * 1 must divide the ranks of a stage, tp * cp * dp = 2 * 1 * 4 = 8; "
            "nearest legal ep sizes: 4, 2, 8",
        ),
        (
            {"tp": 2, "cp": 3, "pp": 5, "dp": 2, "ep": 8, "etp": 2},
            "ep * etp = 8 * 2 must divide the ranks of a stage, tp * cp * dp = 2 * 3 * 2 = 12; "
            "nearest legal ep sizes: 6, 3, 2",
        ),
        (
            {"dp": 1, "ep": 64},
            "ep * etp = 64 * 1 must divide the ranks of a stage, tp * cp * dp = 1 * 1 * 1 = 1; "
            "nearest legal ep sizes: 1",
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


@settings(max_examples=500, deadline=None)
@given(sizes, sizes, sizes, st.integers(1, 70), st.booleans())
def test_the_sizes_that_a_message_names_are_legal(tp, cp, dp, ep, cut):
    etp = tp if cut else 1
    problem = wrong_fold(ep, etp, tp=tp, cp=cp, dp=dp)
    if problem is None:
        assert Grid(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp).ep == ep
        return
    for near in problem.rpartition(": ")[2].split(", "):
        assert Grid(tp=tp, cp=cp, dp=dp, ep=int(near), etp=etp).ep == int(near)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2"])
@pytest.mark.parametrize("axis", ["ep", "etp"])
def test_sizes_that_are_not_positive_ints(axis, size):
    with pytest.raises(InvalidArgumentError) as caught:
        Grid(**{axis: size})
    assert str(caught.value) == f"{axis} size must be a positive int, got {size!r}"


@pytest.mark.parametrize("axis", ["tp_ep", "ep_pp", "ep_ep", "world_ep", "EP", "ep_"])
def test_experts_axes_are_joined_with_none_but_their_own(axis):
    with pytest.raises(InvalidArgumentError, match=r"unknown axis .*; or one or several of"):
        Grid().group(axis, 0)


@pytest.mark.parametrize("rank", [-1, 4, True, 1.0, None])
@pytest.mark.parametrize(
    "call",
    [
        lambda grid, rank: grid.expert_coordinates(rank),
        lambda grid, rank: grid.group("ep", rank),
        lambda grid, rank: grid.group_rank("edp", rank),
        lambda grid, rank: grid.ring_neighbours("etp", rank),
    ],
)
def test_ranks_outside_the_grid(call, rank):
    with pytest.raises(InvalidArgumentError) as caught:
        call(Grid(dp=4, ep=2), rank)
    assert str(caught.value).startswith(f"rank must be an int from 0 to 3, got {rank!r} (layout TP")


@settings(max_examples=200, deadline=None)
@given(grids(), st.integers(1, 64))
def test_nearest_layouts_fit_the_world_and_fold(asked, world_size):
    near = nearest_layouts(asked, world_size)
    assert 1 <= len(near) <= 3
    assert len(set(near)) == len(near)
    assert {grid.world_size for grid in near} == {world_size}
    assert nearest_layouts(asked, asked.world_size, count=1) == [asked]


def test_a_layout_that_does_not_fit_is_answered_with_experts():
    assert layouts.wrong_product(Grid(tp=2, pp=2, dp=4, ep=4), 8) == (
        "the layout needs tp * cp * pp * dp = 2 * 1 * 2 * 4 = 16 ranks, but the world has "
        "8 ranks; nearest layouts that fit: (tp=2, cp=1, pp=2, dp=2, ep=4), "
        "(tp=2, cp=1, pp=1, dp=4, ep=4), (tp=1, cp=1, pp=2, dp=4, ep=4)"
    )
    said = layouts.wrong_product(Grid(tp=2, dp=4, ep=2, etp=2), 4)
    assert "nearest layouts that fit: (tp=2, cp=1, pp=1, dp=2, ep=2, etp=2)," in said


@pytest.mark.parametrize(
    ("grid", "text"),
    [
        (Grid(tp=2, dp=2), "dp0 pp0 cp0 tp1"),
        (Grid(tp=2, dp=2, ep=4), "dp0 pp0 cp0 tp1 edp0 ep1 etp0"),
    ],
)
def test_places_name_experts_only_where_these_have_a_view_of_their_own(grid, text):
    assert layouts.place_text(grid, 1) == text

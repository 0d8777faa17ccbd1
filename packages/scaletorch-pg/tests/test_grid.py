"""The grid as plain data: arithmetic on any number of ranks, errors."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletorch.dist.errors import InvalidArgumentError, ScaletorchError
from scaletorch.parallel.pg_manager import Coordinates, Grid

ORDER = ("dp", "pp", "cp", "tp")
SETS = [axes for count in (1, 2, 3, 4) for axes in itertools.permutations(ORDER, count)]

sizes = st.integers(1, 5)
grids = st.builds(Grid, tp=sizes, cp=sizes, pp=sizes, dp=sizes)
axes = st.one_of(st.sampled_from(["world", "all"]), st.sampled_from(SETS).map("_".join))


def names_of(axis):
    return set(ORDER) if axis in ("world", "all") else set(axis.split("_"))


@st.composite
def grids_and_ranks(draw):
    grid = draw(grids)
    return grid, draw(st.integers(0, grid.world_size - 1))


@settings(deadline=None)
@given(grids)
def test_coordinates_and_rank_are_inverse_and_tp_is_fastest(grid):
    ranges = (range(grid.dp), range(grid.pp), range(grid.cp), range(grid.tp))
    expected = [Coordinates(*place) for place in itertools.product(*ranges)]
    assert [grid.coordinates(rank) for rank in range(grid.world_size)] == expected
    assert [grid.rank(**place._asdict()) for place in expected] == list(range(grid.world_size))


@settings(deadline=None)
@given(grids_and_ranks(), axes)
def test_group_holds_the_ranks_that_agree_on_all_other_axes(grid_and_rank, axis):
    grid, rank = grid_and_rank
    fixed = [name for name in ORDER if name not in names_of(axis)]

    def key(other):
        return [getattr(grid.coordinates(other), name) for name in fixed]

    expected = tuple(other for other in range(grid.world_size) if key(other) == key(rank))
    assert grid.group(axis, rank) == expected
    assert grid.size(axis) == len(expected)
    assert expected[grid.group_rank(axis, rank)] == rank


@settings(deadline=None)
@given(grids, axes)
def test_groups_partition_the_world(grid, axis):
    groups = grid.groups(axis)
    assert sorted(itertools.chain(*groups)) == list(range(grid.world_size))
    assert groups == sorted(groups)
    assert all(grid.group(axis, rank) == group for group in groups for rank in group)


@settings(deadline=None)
@given(grids_and_ranks(), axes)
def test_ring_neighbours_answer_each_other_and_visit_the_group(grid_and_rank, axis):
    grid, rank = grid_and_rank
    ring = grid.ring_neighbours(axis, rank)
    assert grid.ring_neighbours(axis, ring.send).recv == rank
    assert grid.ring_neighbours(axis, ring.recv).send == rank
    visited = [rank]
    while (after := grid.ring_neighbours(axis, visited[-1]).send) != rank:
        visited.append(after)
    assert sorted(visited) == list(grid.group(axis, rank))


@settings(deadline=None)
@given(grids_and_ranks())
def test_pipeline_neighbours_answer_each_other_and_end(grid_and_rank):
    grid, rank = grid_and_rank
    stage = grid.coordinates(rank).pp
    before, after = grid.pipeline_neighbours(rank)
    stages = grid.group("pp", rank)
    assert before == (stages[stage - 1] if stage else None)
    assert after == (stages[stage + 1] if stage < grid.pp - 1 else None)
    if after is not None:
        assert grid.pipeline_neighbours(after).prev == rank


@settings(deadline=None)
@given(grids)
def test_any_spelling_of_joined_axes_is_the_same_group(grid):
    assert grid.groups("cp_dp") == grid.groups("dp_cp")
    assert grid.groups("tp_pp_cp") == grid.groups("cp_tp_pp")
    assert grid.groups("world") == grid.groups("all") == grid.groups("tp_cp_pp_dp")
    assert grid.groups("world") == [tuple(range(grid.world_size))]


def test_documented_example_of_1024_ranks():
    grid = Grid(tp=8, cp=4, pp=16, dp=2)
    assert grid.world_size == 1024
    assert grid.coordinates(300) == Coordinates(dp=0, pp=9, cp=1, tp=4)
    assert str(grid.coordinates(300)) == "dp0 pp9 cp1 tp4"
    assert grid.rank(dp=0, pp=9, cp=1, tp=4) == 300
    assert grid.group("tp", 300) == tuple(range(296, 304))
    assert grid.group("cp", 300) == (292, 300, 308, 316)
    assert grid.group("dp", 300) == (300, 812)
    assert grid.group("cp_dp", 300) == (292, 300, 308, 316, 804, 812, 820, 828)
    assert len(grid.groups("pp_dp")) == 32
    assert grid.ring_neighbours("cp", 316) == (292, 308)
    assert grid.pipeline_neighbours(300) == (268, 332)
    assert str(grid) == "TP(8)-CP(4)-PP(16)-DP(2)"


def test_documented_example_of_128_ranks():
    grid = Grid(tp=2, cp=16, pp=1, dp=4)
    assert grid.world_size == 128
    assert grid.group("cp", 1) == tuple(range(1, 32, 2))
    assert grid.group("pp", 1) == (1,)
    assert grid.pipeline_neighbours(1) == (None, None)
    assert grid.ring_neighbours("pp", 1) == (1, 1)
    assert [len(grid.groups(axis)) for axis in ("tp", "cp", "pp", "dp")] == [64, 8, 128, 32]


def test_grid_is_a_value():
    grid = Grid(tp=2, dp=4)
    assert grid == Grid(2, 1, 1, 4)
    assert {grid: 1}[Grid(tp=2, dp=4)] == 1
    assert repr(grid) == "Grid(tp=2, cp=1, pp=1, dp=4, ep=1, etp=2)"
    with pytest.raises(AttributeError):
        grid.tp = 4


def test_groups_of_a_rank_are_not_looked_up_in_lists_of_all():
    grid = Grid(tp=8, cp=5, pp=10, dp=250)
    assert grid.world_size == 100_000
    tracemalloc.start()
    for rank in range(0, 100_000, 100):
        for axis in ("tp", "cp", "pp", "dp"):
            assert rank in grid.group(axis, rank)
        grid.ring_neighbours("cp", rank)
        grid.ring_neighbours("world", rank)
        grid.pipeline_neighbours(rank)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**19  # a list of all groups has some MiB


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2", None])
@pytest.mark.parametrize("axis", ORDER)
def test_sizes_that_are_not_positive_ints(axis, size):
    with pytest.raises(InvalidArgumentError) as caught:
        Grid(**{axis: size})
    assert str(caught.value) == f"{axis} size must be a positive int, got {size!r}"
    assert isinstance(caught.value, ScaletorchError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("rank", [-1, 4, True, 1.0, "1", None])
@pytest.mark.parametrize(
    "call",
    [
        lambda grid, rank: grid.coordinates(rank),
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


@pytest.mark.parametrize("axis", ["", "xp", "cp_", "cp-dp", "tp_tp", "world_tp", "TP", 3, None])
def test_unknown_axes(axis):
    with pytest.raises(InvalidArgumentError) as caught:
        Grid().group(axis, 0)
    assert str(caught.value) == (
        f"unknown axis {axis!r}: expected one of tp, cp, pp, dp, several of them joined by '_' "
        "(such as 'cp_dp'), or 'world'; or one or several of etp, ep, edp"
    )
